// A chat with a text model. Each answer is a prediction, so it streams, can be stopped, and has its time and cost.

import { call, pause } from "./api.js";
import { button, failure, h, put, say } from "./dom.js";
import { untilEnd } from "./follow.js";
import { remember } from "./history.js";
import { markdown } from "./markdown.js";
import { dollars } from "./money.js";
import { chatSnippets } from "./snippets.js";
import { duration, placeInLine } from "./timing.js";

const USUAL_TOKENS = 512;
const USUAL_TEMPERATURE = 0.7;
/** How often, and how many times, to ask for the cost of an answer that was stopped. */
const COST_POLL_MS = 1000;
const MOST_COST_POLLS = 10;
const EXAMPLES = ["Write a short story", "Explain what an API is in two sentences", "List five names for a coffee shop"];

/** Chats of this tab by model. They end with the page, or when the reader logs out. */
const kept = new Map();

/** Forgets all chats. */
export function forgetChats() {
  kept.clear();
}

/**
 * Whether a chat can show an earlier input: plain texts after at most one system prompt, without other settings.
 * Otherwise, the form shows it.
 */
export function fitsChat(input) {
  if (!input) return true;
  const { messages, max_tokens, temperature, ...others } = input;
  if (!messages?.length || Object.keys(others).length) return false;
  const isPlain = ({ role, content, ...more }) => typeof content === "string" && role !== "tool" && !Object.keys(more).length;
  return messages.every(isPlain) && messages.slice(1).every(({ role }) => role !== "system");
}

/**
 * The chat of a model: its messages, a field to write in, and settings.
 * @param {?object} again input of an earlier try, whose last message is sent again. Null: the chat continues.
 */
export function chatOf(model, schema, signal, again = null) {
  const chat = (!again && kept.get(model.id)) || { messages: [] };
  kept.set(model.id, chat);
  const settings = settingsOf(schema, again ?? chat.body?.input ?? {});
  const log = h("div", { class: "messages", role: "log", "aria-label": "Conversation", tabindex: 0 });
  const code = h("div");
  const field = h("textarea", { id: "message", rows: 2, placeholder: `Message ${model.id}` });
  const place = { model, chat, settings, log, code, signal, isBusy: false, running: null };
  const ask = async (text) => {
    if (place.isBusy || !text.trim()) return;
    field.value = "";
    await talk(place, text.trim(), controls);
  };
  place.ask = ask;
  const send = h("button", { class: "main" }, "Send");
  const stop = button("Stop", () => place.running && call(`${place.running}/cancel`, { method: "POST", signal }), { hidden: true });
  const controls = (isRunning) => {
    send.hidden = isRunning;
    stop.hidden = !isRunning;
    if (!isRunning) field.focus();
  };
  const fresh = button("New chat", () => {
    if (place.isBusy) return;
    chat.messages.length = 0;
    show(place);
    field.focus();
  }, { class: "quiet" });
  const submit = (event) => {
    event.preventDefault();
    ask(field.value);
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask(field.value);
  });
  if (again) {
    const said = again.messages.filter(({ role }) => role !== "system");
    field.value = said.pop()?.content ?? "";
    chat.messages.push(...said);
  }
  show(place);
  return h(
    "div",
    { class: "chat" },
    h(
      "section",
      { class: "card talk", "aria-label": "Chat" },
      log,
      h(
        "form",
        { class: "composer", on: { submit } },
        h("label", { for: "message", class: "hidden" }, "Message"),
        field,
        h("div", { class: "row between" }, h("span", { class: "hint" }, "Enter sends, Shift+Enter begins a line"), h("span", { class: "row" }, fresh, stop, send)),
      ),
    ),
    h("aside", { class: "stack" }, h("div", { class: "card" }, h("h2", {}, "Settings"), settings.element), code),
  );
}

function settingsOf({ properties: given }, input) {
  const field = (id, label, control, hint) =>
    h("div", { class: "field" }, h("label", { for: id }, label), control, hint && h("p", { class: "hint" }, hint));
  const most = given.max_tokens?.maximum ?? given.max_tokens?.anyOf?.[0]?.maximum;
  const usual = Math.max(given.max_tokens?.default ?? 1, Math.min(USUAL_TOKENS, most ?? USUAL_TOKENS));
  const system = h("textarea", { id: "system", rows: 3, placeholder: "You are a helpful assistant." });
  system.value = input.messages?.find(({ role }) => role === "system")?.content ?? "";
  const tokens = h("input", { id: "max-tokens", type: "number", min: 1, max: most, step: 1, value: input.max_tokens ?? usual });
  const temperature = h("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: input.temperature ?? USUAL_TEMPERATURE });
  const read = () => ({ max_tokens: Number(tokens.value) || usual, temperature: Number(temperature.value) });
  const element = h(
    "div",
    { class: "fields" },
    field("system", "System prompt", system, "How the model should behave. Optional."),
    field("max-tokens", "Maximum length", tokens, `In tokens, about ¾ of a word each.${most ? ` This model writes up to ${most}.` : ""}`),
    field("temperature", "Temperature", temperature, "0 always writes the likeliest word, 2 is the wildest."),
  );
  return { element, read, system: () => system.value.trim() };
}

function show(place) {
  const { ask, chat, log } = place;
  put(log, chat.messages.length ? chat.messages.map((message) => bubble(message)) : welcome(place.model, ask));
  put(place.code, chat.body ? chatSnippets(chat.body) : null);
  log.scrollTop = log.scrollHeight;
}

function welcome(model, ask) {
  return h(
    "div",
    { class: "welcome" },
    h("p", { class: "muted" }, `Ask ${model.id} anything, or begin with one of these:`),
    h("div", { class: "row" }, EXAMPLES.map((text) => button(text, () => ask(text), { class: "chip" }))),
  );
}

function bubble({ role, content, facts, error }) {
  return h(
    "article",
    { class: `message ${role}`, "aria-label": role === "user" ? "You" : "Answer" },
    role === "user" ? h("p", {}, content) : content && markdown(content),
    error && h("p", { class: "error", role: "alert" }, error),
    facts && h("p", { class: "hint" }, facts),
  );
}

async function talk(place, text, controls) {
  const { model, chat, settings, log, signal } = place;
  // A second message would be sent along with the first, and its answer would be shown in its place.
  place.isBusy = true;
  chat.messages.push({ role: "user", content: text });
  const answer = { role: "assistant", content: "" };
  const said = chat.messages.map(({ role, content }) => ({ role, content })).filter(({ content }) => content);
  const system = settings.system();
  const messages = system ? [{ role: "system", content: system }, ...said] : said;
  chat.body = { version: model.id, input: { messages, ...settings.read() } };
  show(place);
  const waiting = h("p", { class: "muted" }, "…");
  const live = h("article", { class: "message assistant", "aria-label": "Answer", "aria-busy": "true" }, waiting);
  log.append(live);
  log.scrollTop = log.scrollHeight;
  controls(true);
  say("Sent.");
  try {
    await stream(place, answer, live, waiting);
    say(answer.isStopped ? "The answer was stopped." : "The answer is complete.");
  } catch (error) {
    if (signal.aborted) throw error;
    answer.error = error.message;
  } finally {
    place.isBusy = false;
    place.running = null;
    chat.messages.push(answer);
    if (!signal.aborted) {
      show(place);
      controls(false);
    }
  }
  if (answer.isStopped) await addCost(place, answer);
}

/** Adds the tokens and cost of an answer that was stopped. They are known once the worker has stopped writing it. */
async function addCost(place, answer) {
  for (let polls = 0; polls < MOST_COST_POLLS; polls += 1) {
    await pause(COST_POLL_MS, place.signal);
    if (place.signal.aborted) return;
    const prediction = await call(answer.path, { signal: place.signal }).catch(() => null);
    if (prediction?.metrics.cost_usd === undefined) continue;
    answer.facts = answer.factsOf(prediction);
    if (!place.isBusy) show(place);
    return;
  }
}

async function stream(place, answer, live, waiting) {
  const { chat, signal, log } = place;
  const beganMs = performance.now();
  let firstMs = null;
  const created = await call("v1/predictions", { method: "POST", body: chat.body, signal });
  remember(created, place.model.id);
  const path = `v1/predictions/${encodeURIComponent(created.id)}`;
  place.running = path;
  let drawing = 0;
  const draw = () => {
    drawing = 0;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    put(live, answer.content ? markdown(answer.content) : waiting);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  };
  const add = ({ event, data }) => {
    if (event === "queue") waiting.textContent = placeInLine(JSON.parse(data));
    if (event !== "output") return;
    firstMs ??= performance.now() - beganMs;
    answer.content += data;
    drawing ||= requestAnimationFrame(draw);
  };
  const prediction = await untilEnd(path, "queue", signal, add, () => {
    waiting.textContent = "The connection was lost. Asking for the answer from time to time …";
    drawing ||= requestAnimationFrame(draw);
  });
  cancelAnimationFrame(drawing);
  if (typeof prediction.output === "string") answer.content = prediction.output;
  if (prediction.error) answer.error = prediction.error;
  answer.isStopped = prediction.status === "canceled";
  const { body } = chat;
  answer.path = path;
  answer.factsOf = (ended) => factsOf(ended, body, firstMs, answer.content);
  answer.facts = answer.factsOf(prediction);
}

function factsOf({ id, status, metrics }, { input }, firstMs, content) {
  const written = metrics.output_token_count;
  const seconds = metrics.predict_time;
  const facts = [
    status === "canceled" && "stopped",
    written !== undefined && `${written} tokens${written >= input.max_tokens ? " (the maximum length)" : ""}`,
    written && seconds && `${(written / seconds).toFixed(1)} tokens/s`,
    firstMs !== null && `first after ${duration(firstMs)}`,
    metrics.cost_usd !== undefined && dollars(metrics.cost_usd),
  ].filter(Boolean);
  if (!content && status === "succeeded") facts.unshift("The model wrote nothing");
  return [facts.join(" · "), " · ", h("a", { href: `#predictions/${encodeURIComponent(id)}` }, "details")];
}
