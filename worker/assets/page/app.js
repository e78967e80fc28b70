// Starts the status page and its clock.

import { Status } from "./status.js";
import { askForToken } from "./token.js";

const status = new Status();

askForToken(() => status.refresh());
document.addEventListener("visibilitychange", () => status.refresh());
status.refresh();
