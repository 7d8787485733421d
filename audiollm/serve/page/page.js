"use strict";

const byId = (id) => document.getElementById(id);
let models = [];
let addedVoices = [];

function headers(more = {}) {
  const key = byId("key").value.trim();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try {
    const error = JSON.parse(text).error;
    message = error.param ? `${error.param}: ${error.message}` : error.message;
  } catch { /* not JSON: shown as it is */ }
  throw new Error(`${answer.status}: ${message}`);
}

function fillSelect(select, values) {
  const before = select.value;
  select.replaceChildren(...values.map((value) => new Option(value, value)));
  if (values.includes(before)) select.value = before;
}

function fillVoices() {
  const form = byId("speech");
  const model = models.find((row) => row.id === form.elements.model.value);
  fillSelect(form.elements.voice, ["default", ...(model ? model.voices : []), ...addedVoices]);
}

async function readModels() {
  try {
    models = (await (await call("v1/models")).json()).data;
    addedVoices = (await (await call("v1/audio/voices")).json()).data.filter((row) => row.consent).map((row) => row.name);
  } catch (error) {
    byId("models").textContent = error.message;
    return;
  }
  const abilities = (row) => ["writes", row.speaks && "speaks", row.hears && "hears"].filter(Boolean).join(", ");
  byId("models").textContent = models.map((row) => `${row.id}: ${abilities(row)}`).join(" · ");
  for (const section of document.querySelectorAll("section")) {
    const able = models.filter((row) => section.dataset.needs === "writes" || row[section.dataset.needs]);
    section.hidden = able.length === 0;
    const select = section.querySelector("select[name=model]");
    if (select) fillSelect(select, able.map((row) => row.id));
  }
  fillVoices();
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function showCurl(section, path, more) {
  const key = byId("key").value.trim() ? ' -H "Authorization: Bearer $KEY"' : "";
  section.querySelector(".curl").textContent = `curl ${quoted(new URL(path, location.href).href)}${key} ${more}`;
}

function showText(section, text, isError = false) {
  const place = section.querySelector(".answer");
  place.classList.toggle("error", isError);
  place.textContent = text;
}

function showSound(section, blob, text = "") {
  showText(section, text);
  const player = document.createElement("audio");
  player.controls = true;
  player.src = URL.createObjectURL(blob);
  section.querySelector(".answer").append(player);
  player.play().catch(() => {});
}

function onSubmit(id, work) {
  byId(id).addEventListener("submit", async (event) => {
    event.preventDefault();
    const form = event.target, section = form.closest("section"), button = form.querySelector("button");
    button.disabled = true;
    showText(section, "…");
    try {
      await work(form, section);
    } catch (error) {
      showText(section, error.message, true);
    }
    button.disabled = false;
  });
}

const asJson = (body) => ({ method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

onSubmit("speech", async (form, section) => {
  const body = Object.fromEntries(new FormData(form));
  showCurl(section, "v1/audio/speech", `--json ${quoted(JSON.stringify(body))} -o out.${body.response_format}`);
  const answer = await call("v1/audio/speech", asJson(body));
  showSound(section, await answer.blob(), answer.headers.get("X-Notes") || "");
});

onSubmit("transcription", async (form, section) => {
  const body = new FormData(form), path = body.has("translated") ? "v1/audio/translations" : "v1/audio/transcriptions";
  body.delete("translated");
  const fields = [...body].filter(([name]) => name !== "file").map(([name, value]) => `-F ${quoted(`${name}=${value}`)}`);
  showCurl(section, path, `${fields.join(" ")} -F ${quoted(`file=@${form.elements.file.files[0].name}`)}`);
  const answer = await call(path, { method: "POST", body });
  showText(section, await answer.text());
});

async function asBase64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let start = 0; start < bytes.length; start += 32768) text += String.fromCharCode(...bytes.subarray(start, start + 32768));
  return btoa(text);
}

onSubmit("chat", async (form, section) => {
  const recording = form.elements.recording.files[0];
  const content = [{ type: "text", text: form.elements.question.value }];
  const body = { model: form.elements.model.value, messages: [{ role: "user", content }] };
  if (form.elements.spoken.checked) Object.assign(body, { modalities: ["text", "audio"], audio: { format: "wav" } });
  const shown = structuredClone(body);
  if (recording) {
    content.unshift({ type: "input_audio", input_audio: { data: await asBase64(recording) } });
    shown.messages[0].content.unshift({ type: "input_audio", input_audio: { data: `BASE64 OF ${recording.name}` } });
  }
  showCurl(section, "v1/chat/completions", `--json ${quoted(JSON.stringify(shown))}`);
  const { message } = (await (await call("v1/chat/completions", asJson(body))).json()).choices[0];
  if (!message.audio) return showText(section, message.content || "");
  const bytes = Uint8Array.from(atob(message.audio.data), (letter) => letter.charCodeAt(0));
  showSound(section, new Blob([bytes], { type: "audio/wav" }), message.content || message.audio.transcript || "");
});

onSubmit("voice", async (form, section) => {
  const fields = [...new FormData(form)].map(([name, value]) => `-F ${quoted(`${name}=${value instanceof File ? `@${value.name}` : value}`)}`);
  showCurl(section, "v1/audio/voices", fields.join(" "));
  const body = new FormData(form);
  if (!form.elements.text.value) body.delete("text");
  await call("v1/audio/voices", { method: "POST", body });
  showText(section, `${form.elements.name.value} is a voice now.`);
  await readModels();
});

byId("speech").elements.model.addEventListener("change", fillVoices);
byId("key").addEventListener("change", readModels);
for (const place of document.querySelectorAll(".curl")) {
  place.title = "click to copy";
  place.addEventListener("click", () => navigator.clipboard.writeText(place.textContent));
}
readModels();
