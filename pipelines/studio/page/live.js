// Talks: pieces of sound go to the studio's own server, and what the model says comes back.
(() => {
  "use strict";
  const PIECE_S = 0.5;
  let talk = null, stopping = false, rate = 0;
  let speaker = null, free_s = 0;
  const id = (name) => document.getElementById(`lv-${name}`);

  async function ask(path, body) {
    const answer = await fetch(`/studio/api/live${path}`, { method: "POST", headers: { "x-studio": "1" }, body });
    const content = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(content.sentence || `The studio refused it (${answer.status}).`);
    return content;
  }

  // One stretch of speech after another: 16-bit samples in base64.
  function speak(speech) {
    const samples = new Int16Array(Uint8Array.from(atob(speech), (letter) => letter.charCodeAt(0)).buffer);
    speaker = speaker || new AudioContext();
    const buffer = speaker.createBuffer(1, samples.length, rate);
    buffer.getChannelData(0).set(Float32Array.from(samples, (each) => each / 32768));
    const source = speaker.createBufferSource();
    source.buffer = buffer;
    source.connect(speaker.destination);
    free_s = Math.max(free_s, speaker.currentTime);
    source.start(free_s);
    free_s += buffer.duration;
  }

  function say(said) {
    for (const each of said) {
      if (each.speech) speak(each.speech);
      const item = document.createElement("li");
      const time = document.createElement("span");
      time.textContent = `${each.heard_s.toFixed(1)} s`;
      const text = document.createElement("span");
      text.textContent = each.text;
      item.append(time, text);
      id("said").append(item);
    }
  }

  async function begin() {
    id("said").replaceChildren();
    const made = await ask("", undefined);
    talk = made.talk;
    stopping = false;
    id("stop").disabled = false;
    id("microphone").disabled = id("file").disabled = true;
    rate = made.sample_rate;
  }

  async function end() {
    const ended = talk;
    talk = null;
    id("stop").disabled = true;
    id("microphone").disabled = id("file").disabled = false;
    if (ended) say((await ask(`/${ended}/finish`)).said);
  }

  async function fromFile(file) {
    await begin();
    id("state").textContent = `Interpreting ${file.name} …`;
    try {
      const sound = await new OfflineAudioContext(1, rate, rate).decodeAudioData(await file.arrayBuffer());
      const mono = new Float32Array(sound.length);
      for (let channel = 0; channel < sound.numberOfChannels; channel++) {
        const samples = sound.getChannelData(channel);
        for (let n = 0; n < mono.length; n++) mono[n] += samples[n] / sound.numberOfChannels;
      }
      const size = Math.round(PIECE_S * rate);
      for (let n = 0; n < mono.length && !stopping; n += size) {
        say((await ask(`/${talk}/hear`, mono.slice(n, n + size))).said);
        id("state").textContent = `Heard ${Math.min(mono.length, n + size) / rate | 0} of ${mono.length / rate | 0} s.`;
      }
    } finally { await end(); }
    id("state").textContent = "The talk has ended.";
  }

  async function fromMicrophone() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    let context = null;
    const silence = async () => {
      stream.getTracks().forEach((track) => track.stop());
      if (context && context.state !== "closed") await context.close();
    };
    try {
      await begin();
      context = new AudioContext({ sampleRate: rate });
      const code = "registerProcessor('pieces', class extends AudioWorkletProcessor {"
        + " process(inputs) { if (inputs[0][0]) this.port.postMessage(inputs[0][0].slice()); return true; } })";
      await context.audioWorklet.addModule(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
      const node = new AudioWorkletNode(context, "pieces");
      const waiting = [];
      let heard = 0;
      node.port.onmessage = (event) => { waiting.push(event.data); };
      context.createMediaStreamSource(stream).connect(node);
      id("state").textContent = "Listening …";
      for (;;) {
        if (stopping) await silence();
        else await new Promise((done) => setTimeout(done, PIECE_S * 500));
        const count = waiting.reduce((sum, each) => sum + each.length, 0);
        if (stopping && !count) break;  // what came in before the stop is heard, too
        if (!stopping && count < PIECE_S * rate / 2) continue;
        const piece = new Float32Array(Math.min(count, 4 * rate));
        let place = 0;
        while (waiting.length && place + waiting[0].length <= piece.length) { piece.set(waiting[0], place); place += waiting.shift().length; }
        say((await ask(`/${talk}/hear`, piece.slice(0, place))).said);
        heard += place / rate;
        id("state").textContent = `Listening: heard ${heard.toFixed(0)} s.`;
      }
    } finally {
      await silence();
      await end();
    }
    id("state").textContent = "The talk has ended.";
  }

  const guarded = (work) => (...given) => work(...given).catch((error) => {
    id("state").textContent = error.name === "NotAllowedError" ? "The browser does not let the page hear the microphone: allow it, then try again."
      : error.name === "EncodingError" ? "The file cannot be decoded by this browser: give WAV, MP3 or OGG."
        : error.name === "NotFoundError" ? "There is no microphone: give a file." : error.message;
  });

  setInterval(() => {
    const root = document.getElementById("live");
    if (!root || root.dataset.ready) return;
    root.dataset.ready = "yes";
    id("file").onchange = () => {
      if (id("file").files[0]) guarded(fromFile)(id("file").files[0]);
      id("file").value = "";  // the same file may be chosen again
    };
    id("microphone").onclick = guarded(fromMicrophone);
    id("stop").onclick = () => { stopping = true; };
    window.addEventListener("pagehide", () => {
      if (talk) fetch(`/studio/api/live/${talk}/finish`, { method: "POST", headers: { "x-studio": "1" }, keepalive: true });
    });
  }, 200);
})();
