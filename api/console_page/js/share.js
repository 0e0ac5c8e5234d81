// A link to a prediction, for colleagues: other keys of the tenant may read it too.

import { button, say } from "./dom.js";

/** A button that copies the address of a prediction's page. */
export function copyLink(id) {
  const url = `${location.origin}${location.pathname}#predictions/${encodeURIComponent(id)}`;
  const copy = async () => {
    await navigator.clipboard.writeText(url);
    say("The link was copied. It opens with any key of your tenant, for as long as the prediction is kept.");
  };
  // Pages without TLS have no clipboard.
  return button("Copy link", copy, { class: "quiet", onError: () => window.prompt("Copy this link", url) });
}
