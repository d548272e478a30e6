// A table: columns are {key, label, number, cell, sort}; the caller sorts and pages.

import { h } from "./dom.js";
import { t } from "./strings.js";

export function table({ label, columns, rows, sort = "", onsort = null, chosen = () => false }) {
  const head = columns.map((column) => {
    const kind = column.number ? "number" : null;
    if (!column.sort || !onsort) return h("th", { scope: "col", class: kind }, column.label);
    const is = sort.replace(/^-/, "") === column.sort;
    const order = is ? (sort.startsWith("-") ? "descending" : "ascending") : "none";
    return h(
      "th",
      { scope: "col", class: kind, "aria-sort": order },
      h(
        "button",
        { type: "button", "data-focus": `sort-${column.sort}`, onclick: () => onsort(sort === `-${column.sort}` ? column.sort : `-${column.sort}`) },
        column.label + (is ? (sort.startsWith("-") ? " ↓" : " ↑") : ""),
      ),
    );
  });
  const body = rows.map((row) =>
    h(
      "tr",
      { class: chosen(row) ? "is-chosen" : null },
      columns.map((column) => h("td", { class: column.number ? "number" : column.text ? "text" : null }, column.cell(row))),
    ),
  );
  if (!rows.length) body.push(h("tr", {}, h("td", { colspan: columns.length, class: "quiet" }, t("nothing"))));
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {}, h("caption", { class: "sr" }, label), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

export function facts(pairs) {
  return h(
    "dl",
    { class: "facts-list" },
    pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}
