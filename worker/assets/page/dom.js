// Helpers that create elements.

export const element = (id) => document.getElementById(id);

export function made(tag, text = "", className = "") {
  const node = document.createElement(tag);
  node.append(text);
  if (className) node.className = className;
  return node;
}

// A row of a table: a cell for each text or node.
export function row(...contents) {
  const line = document.createElement("tr");
  line.append(...contents.map((content) => made("td", content)));
  return line;
}

export function table(heads, rows) {
  const whole = document.createElement("table");
  whole.createTHead().insertRow().append(...heads.map((text) => {
    const cell = made("th", text);
    cell.scope = "col";
    return cell;
  }));
  whole.createTBody().append(...rows.map((contents) => row(...contents)));
  return whole;
}
