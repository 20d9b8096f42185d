// The server's API: requests, streams of lines, and what goes wrong.

const KEY = "qknorm.key";

/** Something the server said no to, in its words. */
export class Problem extends Error {
  constructor(status, detail, retryAfter = null) {
    super(detail);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Sends this key from now on; what no header could carry is no key, and the server will say so. */
export function useKey(key) {
  sessionStorage.setItem(KEY, key.replace(/[^\x21-\x7e]/g, "?"));
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

async function request(path, body = null, signal = null) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server does not answer; is it still running?");
  }
  if (response.ok) return response;
  const { detail } = await response.json().catch(() => ({ detail: response.statusText }));
  throw new Problem(response.status, detail, Number(response.headers.get("Retry-After")) || null);
}

export const listPairs = async () => (await request("/pairs")).json();

export const lookAt = async (text, pair, signal) => (await request("/attention", { text, pair }, signal)).json();

/** The lines of a translation as they arrive: the count first, then sentences, then the end. */
export async function* translate(body, signal) {
  const response = await request("/translate/stream", body, signal);
  for await (const line of linesOf(response.body)) {
    if (line.error) throw new Problem(503, line.error);
    yield line;
    if (line.done) return;
  }
  throw new Problem(0, "The server broke off; try again.");
}

async function* linesOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) yield JSON.parse(line);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
