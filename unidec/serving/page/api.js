// Requests to this server. Addresses are relative: the page also works behind a proxy that adds a prefix.

let key = ""; // an API key lives in this tab's memory only

export const useKey = (text) => { key = text; };

// An error as the page shows it: `title`, `lines`, and what to do: `kind` "key" (ask for one), "wait" (retry after
// `retry` seconds) or "wrong" (the request must change).
export class Refused extends Error {
  constructor(title, lines, kind, retry = 0) {
    super(title);
    Object.assign(this, { title, lines, kind, retry });
  }
}

export const post = (path, body, signal) =>
  ask(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal });

export const get = (path, signal) => ask(path, { signal });

async function ask(path, options) {
  const headers = { Accept: "application/json", ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", credentials: "same-origin", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer", ["Is it still running? This page retries."], "wait", 2);
  }
  let body = null;
  try {
    body = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
  }
  if (answer.ok && body !== null) return body;
  throw refusal(answer, body?.error);
}

function refusal(answer, error) {
  const { status } = answer;
  const lines = [];
  if (error?.where) lines.push(`Where: ${error.where}`);
  if (present(error?.got)) lines.push(`Got: ${shown(error.got)}`);
  if (present(error?.expected)) lines.push(`Expected: ${shown(error.expected)}`);
  if (status === 401) return new Refused(key ? "The API key is wrong" : "This server requires an API key", [], "key");
  if (status === 503 || status === 429) { // the fix is to retry, which this page does
    const retry = Math.min(30, Math.max(1, Number(answer.headers.get("Retry-After")) || 2));
    return new Refused(capital(shown(error?.what ?? "the server is busy")), lines, "wait", retry);
  }
  if (present(error?.fix)) lines.push(capital(shown(error.fix)));
  const title = error?.what ? capital(shown(error.what)) : `The server answered ${status} ${answer.statusText}`.trim();
  return new Refused(title, lines, "wrong");
}

const present = (value) => value !== null && value !== undefined && value !== "";
const shown = (value) => {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 300 ? `${text.slice(0, 300)} …` : text;
};
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
