// Starts the page and its clock, and asks for the token where the worker wants one.

import { hasToken, onUnauthorized, useToken } from "./client.js";
import { Status } from "./status.js";

const element = (id) => document.getElementById(id);
const form = element("token-form");
const status = new Status();

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
document.addEventListener("visibilitychange", () => status.refresh());
status.refresh();
