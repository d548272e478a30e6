// What is wrong, since when, and what to do.

import { get, of } from "../api.js";
import { h } from "../dom.js";
import { duration, time, zone } from "../format.js";
import { address } from "../state.js";
import { has, t } from "../strings.js";
import { readable } from "../verdict.js";

export async function draw({ run, query }) {
  if (query.runbook) {
    const { text } = await get(`runbooks/${encodeURIComponent(query.runbook)}`);
    return [h("p", {}, h("a", { href: address({}) }, t("back"))), h("pre", { class: "panel page" }, text)];
  }
  const { alarms } = await of(run, "alarms");
  const items = alarms.map((alarm) =>
    h(
      "div",
      { class: `alarm ${alarm.severity}` },
      h("p", {}, h("span", { class: `badge ${alarm.severity === "critical" ? "bad" : alarm.severity === "info" ? "quiet" : "warn"}` }, t(alarm.severity)), " ", h("b", {}, t(`alarm_${alarm.name}`, readable(alarm.values)))),
      has(`remedy_${alarm.name}`) && h("p", {}, t(`remedy_${alarm.name}`, readable(alarm.values))),
      alarm.since > 0 && h("p", {}, t("since", { time: time(alarm.since), duration: duration((Date.now() - alarm.since) / 1000) })),
      alarm.runbook && h("p", {}, h("a", { href: address({ runbook: alarm.runbook }) }, `${t("runbook")}: ${alarm.runbook}`)),
    ),
  );
  if (!items.length) items.push(h("p", { class: "panel good", id: "no-alarms" }, t("no_alarms")));
  return [...items, h("p", { class: "quiet" }, t("zone", { zone: zone() }))];
}

export function isStill(query) {
  return Boolean(query.runbook);
}
