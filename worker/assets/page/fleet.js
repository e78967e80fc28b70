// The workers of a fleet by group; the page shows one of them in detail. A single worker has no list.

import { answer, useWorker } from "./client.js";
import { element, made } from "./dom.js";

const table = element("workers");

export class Fleet {
  // `changed` is called when the user chooses another worker.
  constructor(changed) {
    this.changed = changed;
    this.chosen = null;
    this.shown = null;
    this.rows = new Map();
  }

  // Shows the gateway's view of all workers. Returns the id of the worker shown below, if any.
  show(workers) {
    element("fleet").hidden = false;
    const ids = workers.map(({ id }) => id).sort().join();
    if (ids !== [...this.rows.keys()].sort().join()) this.draw(workers);
    for (const { id, well, running } of workers) {
      const [state, n] = this.rows.get(id).cells;
      state.textContent = well ? "well" : "does not answer";
      n.textContent = running;
    }
    for (const [group, sum] of this.sums) {
      const own = workers.filter(({ model }) => model === group);
      const running = own.reduce((total, each) => total + each.running, 0);
      sum.textContent = `${group}: ${own.filter(({ well }) => well).length} of ${own.length} well, ${running} running`;
    }
    if (!this.rows.has(this.chosen)) this.choose((workers.find(({ well }) => well) ?? workers[0])?.id ?? null);
    useWorker(this.chosen);
    return (this.shown = this.chosen);
  }

  // A body of the table for each group.
  draw(workers) {
    this.rows.clear();
    this.sums = new Map();
    for (const body of [...table.tBodies]) body.remove();
    for (const group of new Set(workers.map(({ model }) => model))) {
      const body = table.createTBody();
      const head = made("th");
      head.scope = "rowgroup";
      head.colSpan = 3;
      body.insertRow().append(head);
      this.sums.set(group, head);
      for (const { id } of workers.filter(({ model }) => model === group)) {
        const button = made("button", id);
        const cells = [made("td"), made("td")];
        const name = made("td");
        name.append(button);
        body.insertRow().append(name, ...cells);
        button.addEventListener("click", () => { this.choose(id); this.changed(); });
        button.setAttribute("aria-pressed", id === this.chosen);
        this.rows.set(id, { button, cells });
      }
    }
  }

  choose(id) {
    this.chosen = id;
    for (const [other, { button }] of this.rows) button.setAttribute("aria-pressed", other === id);
  }

  // The address of a chat with the selected worker's model.
  async chat() {
    const { data: [{ id }] } = await answer("v1/models");
    return `chat/?model=${encodeURIComponent(id)}`;
  }
}
