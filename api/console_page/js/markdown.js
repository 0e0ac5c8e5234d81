// Markdown of models as elements. The kept library marked reads it; only the elements below are made, so that
// nothing a model writes is markup: HTML stays text, images are links, and links lead to http, https and mail only.

import { h } from "./dom.js";
import { lexer } from "./vendor/marked/marked.esm.js";

const LONGEST = 200_000;
const LINK = /^(https?:|mailto:)/i;

/** The elements of a text in Markdown. */
export function markdown(text) {
  const cut = text.slice(0, LONGEST);
  return h("div", { class: "markdown" }, blocksOf(cut), text.length > LONGEST && h("p", { class: "muted" }, "The rest is not shown."));
}

function blocksOf(text) {
  try {
    return blocks(lexer(text, { gfm: true, breaks: true }));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    // Quotes or lists inside each other, a thousand times.
    return h("pre", { class: "code", tabindex: 0 }, text);
  }
}

const blocks = (tokens) => (tokens ?? []).map(block);

function block(token) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      // The page has the first two levels.
      return h(`h${Math.min(6, token.depth + 2)}`, {}, inlines(token));
    case "paragraph":
      return h("p", {}, inlines(token));
    case "code":
      return h("pre", { class: "code", tabindex: 0 }, token.text);
    case "blockquote":
      return h("blockquote", {}, blocks(token.tokens));
    case "list":
      return h(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 ? token.start : null }, token.items.map(item));
    case "table":
      return table(token);
    case "hr":
      return h("hr");
    case "html":
      return h("p", {}, token.raw.trim());
    default:
      return token.tokens ? h("p", {}, inlines(token)) : (token.text ?? token.raw);
  }
}

/** An item without paragraphs of its own has its text directly. */
function item({ tokens, task, checked, loose }) {
  const own = tokens.filter(({ type }) => type !== "checkbox");
  const parts = own.map((token) => (token.type === "text" && !loose ? inlines(token) : block(token)));
  return h("li", {}, task && h("input", { type: "checkbox", disabled: true, checked, "aria-label": "done" }), parts);
}

function table({ header, rows }) {
  const cells = (name, row) => row.map((cell) => h(name, name === "th" ? { scope: "col" } : {}, inlines(cell)));
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, h("tr", {}, cells("th", header))), h("tbody", {}, rows.map((row) => h("tr", {}, cells("td", row))))),
  );
}

const inlines = (token) => (token.tokens ? token.tokens.map(inline) : (token.text ?? token.raw));

function inline(token) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return h(token.type, {}, inlines(token));
    case "codespan":
      return h("code", {}, token.text);
    case "br":
      return h("br");
    case "link":
      return LINK.test(token.href) ? link(token.href, inlines(token)) : inlines(token);
    case "image":
      return LINK.test(token.href) ? link(token.href, token.text || token.href) : token.raw;
    case "checkbox":
      return null;
    case "html":
      return token.raw;
    default:
      return inlines(token);
  }
}

const link = (href, words) => h("a", { href, rel: "noopener noreferrer nofollow", target: "_blank" }, words);
