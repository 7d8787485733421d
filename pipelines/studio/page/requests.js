// Requests to the server: the page talks to its own server alone.
import { state } from "./state.js";

const cut = () => Object.assign(
  new Error("The studio does not answer: was it ended? Versions that were finished are kept."), { isOffline: true });

export async function ask(path, options = {}) {
  const headers = { "x-studio": "1" };
  if (options.json !== undefined) {
    headers["content-type"] = "application/json";
    options.body = JSON.stringify(options.json);
  }
  let answer;
  try {
    answer = await fetch(`/studio/api${path}`, { method: options.method || "GET", headers, body: options.body,
      signal: options.signal });
  } catch {
    throw cut();
  }
  if (options.as && answer.ok) return answer[options.as]();
  let content = {};
  try { content = await answer.json(); } catch { if (answer.ok) throw cut(); /* else an error without a sentence */ }
  if (!answer.ok) throw new Error(content.sentence || `The studio refused it (${answer.status}).`);
  return content;
}

export const here = (rest = "") => `/projects/${state.project.id}${rest}`;
// an answer may come after another project was opened, and is not that one's
export const isOpen = (id) => state.project !== null && state.project.id === id;
export const versionPath = (id, rest) => here(`/versions/${id}${rest}`);
