// Calls the API. The key stays in this tab: in sessionStorage, and in the Authorization header.

const KEPT = "penstock.key";
const CONNECTS = 5;
const FIRST_PAUSE_MS = 1000;
const TOO_MANY = 429;

/** URL of the API: the page is served next to it, with or without a prefix. */
export const base = new URL(".", document.location.href);

let key = sessionStorage.getItem(KEPT) ?? "";

/** Uses this key from now on. Empty: none. */
export function useKey(text) {
  key = text;
  if (text) sessionStorage.setItem(KEPT, text);
  else sessionStorage.removeItem(KEPT);
}

export const hasKey = () => key !== "";

/** The public part of the key. Empty: none. Keys are pk_live_ID_SECRET (shared/tenants/api_key.py). */
export const keyId = () => /^pk_live_([0-9A-Za-z]+)_/.exec(key)?.[1] ?? "";

/** An error response of the API, with its message. */
export class ApiError extends Error {
  /** @param {string} createdBefore where a search among older entries goes on, if the API names it. */
  constructor(status, message, createdBefore) {
    super(message);
    this.status = status;
    this.createdBefore = createdBefore;
  }
}

/**
 * Sends a request.
 * @param {string} path below the API, such as `v1/models`.
 * @param {object} options `method`, `body` (a form, or sent as JSON), `headers`, `signal`.
 * @returns {Promise<Response>} an answer without an error.
 */
export async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key) sent.authorization = `Bearer ${key}`;
  const isForm = body instanceof FormData;
  if (body !== undefined && !isForm) sent["content-type"] = "application/json";
  const response = await fetch(new URL(path, base), {
    method,
    headers: sent,
    body: body === undefined || isForm ? body : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    signal,
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Sends a request, and reads the answer as JSON. */
export async function call(path, options) {
  return (await send(path, options)).json();
}

/** The rows of a report as objects, by the names of its columns. */
export async function reportRows(name, query, signal) {
  const { columns, rows } = await call(`v1/reports/${encodeURIComponent(name)}?${new URLSearchParams(query)}`, { signal });
  return rows.map((row) => Object.fromEntries(columns.map((column, at) => [column.name, row[at]])));
}

/** Uploads a file. Returns its URL, for inputs. */
export async function upload(file) {
  const body = new FormData();
  body.append("content", file, file.name);
  return (await call("v1/files", { method: "POST", body })).urls.get;
}

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  let createdBefore;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.detail ?? message;
    createdBefore = body.error?.created_before;
  } catch {
    // Not from the API: a proxy on the way, or an answer that was cut.
  }
  if (response.status === 401) document.dispatchEvent(new Event("penstock:unauthorized"));
  return new ApiError(response.status, String(message), createdBefore);
}

/** An event stream that could not be reopened. */
export class StreamLost extends Error {}

/** Waits. Ends early if the signal is aborted. */
export function pause(ms, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
    if (signal.aborted) end();
  });
}

/**
 * Yields server-sent events as {event, data}. If the stream ends too early, it reconnects after pauses that double,
 * and finally throws StreamLost. EventSource can't send a key. https://html.spec.whatwg.org/multipage/server-sent-events.html
 */
export async function* events(path, signal) {
  let lastId = "";
  for (let tries = 0; tries < CONNECTS; tries += 1) {
    if (tries) await pause(FIRST_PAUSE_MS * 2 ** (tries - 1), signal);
    signal.throwIfAborted();
    try {
      const response = await send(path, {
        headers: lastId ? { "last-event-id": lastId } : {},
        signal,
      });
      for await (const found of parsed(response.body)) {
        lastId = found.id || lastId;
        if (found.id) tries = 0;
        yield found;
        if (found.event === "done") return;
      }
    } catch (error) {
      if (error.name === "AbortError" || isRefusal(error)) throw error;
    }
  }
  throw new StreamLost("the stream of events was lost");
}

/** Whether an error would come again: the API understood the request and refused it. */
export const isRefusal = (error) => error instanceof ApiError && error.status < 500 && error.status !== TOO_MANY;

async function* parsed(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = fieldsOf(block);
        if (found.data !== null) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function fieldsOf(block) {
  const found = { event: "message", id: "", data: null };
  for (const line of block.split("\n")) {
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line) ?? [];
    if (name === "data") found.data = found.data === null ? value : `${found.data}\n${value}`;
    else if (name === "event" || name === "id") found[name] = value;
  }
  return found;
}

/** The bytes behind a link of this API, whatever host the link names. */
export async function linked(link, signal) {
  const { pathname, search } = new URL(link);
  const response = await fetch(new URL(ownPath(pathname) + search, base), {
    credentials: "omit",
    signal,
  });
  if (!response.ok) throw await refusal(response);
  return response.blob();
}

function ownPath(pathname) {
  const at = pathname.indexOf("/v1/objects/");
  if (at < 0) throw new Error("the answer links to another place than this API");
  return pathname.slice(at + 1);
}
