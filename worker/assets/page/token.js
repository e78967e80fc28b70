// The form that asks for the token if the worker requires one.

import { hasToken, onUnauthorized, useToken } from "./client.js";
import { element } from "./dom.js";

// `given` is called once there is a token to try.
export function askForToken(given) {
  const form = element("token-form");
  onUnauthorized(() => {
    if (!form.hidden) return;
    if (hasToken()) element("token-text").textContent = "The worker does not accept this token. Try another one.";
    form.hidden = false;
    element("token").focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    useToken(element("token").value);
    element("token").value = "";
    form.hidden = true;
    given();
  });
}
