// Corrections on their way to the server: in order, again and again until it has answered, each written once by the name of
// its operation. They stay in the window's storage until then: loading the page again loses none.

const RETRY_MS = 700;

export class CorrectionQueue {
  // `on.sent(item, row)`, `on.conflict(item, row, later)`, `on.refused(item, sentence)`, `on.state(waiting, sentence)`
  constructor(on) {
    this.on = on;
    this.storage = `audiollm-review:${location.pathname}`;
    this.items = JSON.parse(sessionStorage.getItem(this.storage) || "[]");
    this.isSending = false;
    this.send();
  }

  push(item) {
    this.items.push({ operation: crypto.randomUUID(), ...item });
    this.changed("");
    this.send();
  }

  changed(sentence) {
    sessionStorage.setItem(this.storage, JSON.stringify(this.items));
    this.on.state(this.items.length, sentence);
  }

  async send() {
    if (this.isSending) return;
    this.isSending = true;
    while (this.items.length) {
      const item = this.items[0];
      const answer = await post(item);
      if (answer.isLate) {
        this.changed(answer.sentence);
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
        continue;
      }
      this.items.shift();
      if (answer.status === 409) {
        // what was done to the same segment after this was done upon it
        const later = this.items.filter((other) => other.key === item.key);
        this.items = this.items.filter((other) => other.key !== item.key);
        this.changed("");
        this.on.conflict(later.length ? later[later.length - 1] : item, answer.body.row, answer.body.sentence);
      } else if (answer.status === 200) {
        this.changed("");
        this.on.sent(item, answer.body, this.items.some((other) => other.key === item.key));
      } else {
        this.items = this.items.filter((other) => other.key !== item.key);
        this.changed("");
        this.on.refused(item, answer.sentence);
      }
    }
    this.isSending = false;
  }
}

async function post(item) {
  try {
    const answer = await fetch("corrections", {
      method: "POST",
      headers: { "content-type": "application/json", "x-studio": "1" },
      body: JSON.stringify(item),
    });
    const body = await answer.json();
    const sentence = sentenceOf(body);
    return { status: answer.status, body, sentence, isLate: answer.status >= 500 };
  } catch {
    return { isLate: true, sentence: "The server does not answer. Start it again: the page goes on by itself." };
  }
}

export async function ask(address) {
  let answer;
  try {
    answer = await fetch(address);
  } catch {
    throw new Error("The server does not answer. Start it again, then try again.");
  }
  if (!answer.ok) throw new Error(sentenceOf(await answer.json().catch(() => ({}))) || `Refused (${answer.status}).`);
  return answer.json();
}

function sentenceOf(body) {
  return body.sentence || body.error?.message || "";
}
