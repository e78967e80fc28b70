// Starts the page: its two views, the token, and the clock of the status view.

import { hasToken, onUnauthorized, useToken } from "./client.js";
import { startPlayground } from "./playground.js";
import { startStatus } from "./status.js";

const element = (id) => document.getElementById(id);
const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    element(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  window.dispatchEvent(new Event("resize"));
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
}

const form = element("token-form");
onUnauthorized(() => {
  if (!form.hidden) return;
  if (hasToken()) element("token-text").textContent = "The worker does not take this token. Try another one.";
  form.hidden = false;
  element("token").focus();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(element("token").value);
  element("token").value = "";
  form.hidden = true;
  status.refresh();
});

const status = startStatus();
startPlayground();
