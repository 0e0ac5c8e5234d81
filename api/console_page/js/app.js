// The frame: logs in, and shows the view that the address names.

import { call, hasKey, useKey } from "./api.js";
import { failure, h, hush, keepFocus, put, say } from "./dom.js";
import * as audit from "./audit.js";
import * as batches from "./batches.js";
import { forgetChats } from "./chat.js";
import { forget } from "./history.js";
import * as invoices from "./invoices.js";
import * as keys from "./keys.js";
import * as live from "./live.js";
import * as overview from "./overview.js";
import * as plans from "./plans.js";
import * as predictions from "./predictions.js";
import * as reports from "./reports.js";
import * as tenants from "./tenants.js";
import * as trial from "./trial.js";
import * as usage from "./usage.js";

const VIEWS = { overview, try: trial, predictions, batches, usage, reports, invoices, live, keys, tenants, plans, audit };
const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
let leaving = new AbortController();
let isIn = false;

/** Logs in with the key of this tab, or without one if the API needs none. */
async function start() {
  if (hasKey() || (await needsNoKey())) await logIn();
  else logOut();
}

async function needsNoKey() {
  try {
    return (await call("readyz")).keys === "not required";
  } catch {
    return false;
  }
}

async function logIn() {
  try {
    const account = await call("v1/account");
    isIn = true;
    document.getElementById("who").textContent = account.username;
    document.getElementById("leave").hidden = !hasKey();
    tabs.hidden = false;
    await show();
  } catch (error) {
    logOut(error);
  }
}

function logOut(reason = null) {
  leaving.abort();
  isIn = false;
  useKey("");
  forget();
  forgetChats();
  tabs.hidden = true;
  document.getElementById("who").textContent = "";
  document.getElementById("leave").hidden = true;
  const field = h("input", {
    id: "key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
  });
  const enter = (event) => {
    event.preventDefault();
    const text = field.value.trim();
    // Other characters can't stand in a header, and are in no key.
    if (!/^[\x21-\x7e]+$/.test(text)) return logOut(new Error("the API key is not valid"));
    useKey(text);
    return logIn();
  };
  put(
    main,
    h(
      "form",
      { class: "card login", on: { submit: enter } },
      h("h1", {}, "Log in"),
      h("label", { for: "key" }, "API key"),
      field,
      h("p", { class: "muted" }, "The key stays in this tab and is forgotten when it closes."),
      reason && failure(reason),
      h("button", {}, "Log in"),
    ),
  );
  field.focus();
}

async function show() {
  if (!isIn) return;
  const [path, query] = location.hash.slice(1).split(/\?(.*)/s);
  const [name, ...rest] = path.split("/").map(decoded);
  if (name === "main") return;
  const view = Object.hasOwn(VIEWS, name) ? name : "try";
  entitle(tabs.querySelector(`a[href="#${view}"]`));
  for (const link of tabs.querySelectorAll("a")) {
    if (link.getAttribute("href") === `#${view}`) {
      link.setAttribute("aria-current", "page");
      // On a phone the links are in a row that scrolls.
      tabs.scrollLeft = link.offsetLeft - tabs.clientWidth / 2;
    } else link.removeAttribute("aria-current");
  }
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  hush();
  const place = h("section", { class: "view" });
  put(main, place);
  window.scrollTo(0, 0);
  try {
    await VIEWS[view].show(place, rest, signal, new URLSearchParams(query));
  } catch (error) {
    for (const waiting of place.querySelectorAll(".loading")) waiting.remove();
    if (!signal.aborted) place.append(failure(error));
  }
  if (signal.aborted) return;
  entitle(place.querySelector(".invoice .title, h1:not(.hidden)"));
  keepFocus();
}

/** Names the page, and with it the PDF that it is printed to. */
function entitle(heading) {
  document.title = heading ? `${heading.textContent} – Penstock` : "Penstock console";
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return "";
  }
}

document.getElementById("leave").addEventListener("click", () => logOut());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.addEventListener("pointerdown", () => say(""));
document.addEventListener("penstock:unauthorized", () => {
  if (isIn) logOut(new Error("this API key is no longer accepted"));
});
window.addEventListener("hashchange", show);
start();
