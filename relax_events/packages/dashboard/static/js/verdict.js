// The verdict on a run: what it does, because of which number, and what to do about it.

import { h } from "./dom.js";
import { duration, number, percent } from "./format.js";
import { address } from "./state.js";
import { has, t } from "./strings.js";

const GOOD = ["learning", "learned", "starting"];

export function readable(values) {
  const shown = {};
  for (const [name, value] of Object.entries(values)) {
    if (name === "ratio" || name === "busy") shown[name] = percent(value);
    else if (name === "seconds" || name === "interval") shown[name] = duration(value);
    else shown[name] = typeof value === "number" ? number(value) : value;
  }
  return shown;
}

export function drawVerdict({ state, name, values, page, runbook }) {
  const shown = readable(values);
  const good = GOOD.includes(state);
  return h(
    "div",
    { class: good ? "banner good" : `alarm ${state === "ill" ? "critical" : ""}`, id: "run-verdict" },
    h("p", {}, h("span", { class: `badge ${good ? "good" : state === "ill" ? "bad" : "warn"}` }, t(`verdict_${state}`)), " ", h("b", {}, t(`alarm_${name}`, shown))),
    has(`remedy_${name}`) && h("p", {}, t(`remedy_${name}`, shown)),
    !good && h("p", {}, h("a", { href: address({ page }) }, t(page)), runbook && [" · ", h("a", { href: address({ page: "alarms", runbook }) }, `${t("runbook")}: ${runbook}`)]),
  );
}
