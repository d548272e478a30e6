// What each worker reported last, a plot for a metric with a line for a worker.

import { of } from "../api.js";
import { h } from "../dom.js";
import { plot } from "../plot.js";
import { go } from "../state.js";
import { t } from "../strings.js";

const MAX_LINES = 7;

export async function draw({ run, query }) {
  const { workers } = await of(run, "tails");
  const names = Object.keys(workers);
  const roles = [...new Set(names.map((name) => name.replace(/-\d+$/, "")))];
  const role = roles.includes(query.role) ? query.role : "";
  const metrics = [...new Set(names.flatMap((name) => Object.keys(workers[name].series)))].sort();
  const newest = Math.max(0, ...names.map((name) => workers[name].at.at(-1) ?? 0));
  const plots = metrics.map((metric) => {
    const mine = names.filter((name) => workers[name].series[metric] && (!role || name.startsWith(`${role}-`))).slice(0, MAX_LINES);
    if (!mine.length) return null;
    const times = [...new Set(mine.flatMap((name) => workers[name].at))].sort((a, b) => a - b);
    const series = mine.map((name) => {
      const by = new Map(workers[name].at.map((at, index) => [at, workers[name].series[metric][index]]));
      return { label: name, values: times.map((at) => by.get(at) ?? null) };
    });
    return plot({ key: `tail-${metric}`, title: metric, x: times.map((at) => (at - newest) / 1000), xLabel: "s", series });
  });
  return [
    h("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, h("label", {}, t("role"), h("select", { "data-focus": "role", onchange: (event) => go({ role: event.target.value }, { keep: true }) }, h("option", { value: "" }, t("all")), roles.map((name) => h("option", { value: name, selected: name === role }, name))))),
    h("div", { class: "grid" }, plots.filter(Boolean)),
  ];
}
