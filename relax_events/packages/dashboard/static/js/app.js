// The frame: head, pages, the stream of news. A page draws itself from the address and the API.

import { get, of } from "./api.js";
import { h, replace } from "./dom.js";
import { duration, number, time } from "./format.js";
import { forgetPlots } from "./plot.js";
import { snapshot } from "./snapshot.js";
import { address, go, place, query, remember } from "./state.js";
import { lang, t } from "./strings.js";
import * as alarms from "./pages/alarms.js";
import * as config from "./pages/config.js";
import * as deadletters from "./pages/deadletters.js";
import * as fleet from "./pages/fleet.js";
import * as lag from "./pages/lag.js";
import * as lineage from "./pages/lineage.js";
import * as overview from "./pages/overview.js";
import * as result from "./pages/result.js";
import * as runs from "./pages/runs.js";
import * as samples from "./pages/samples.js";
import * as tails from "./pages/tails.js";
import * as timeline from "./pages/timeline.js";

const LIVE = { alarms, overview, timeline, lag, samples, lineage, deadletters, fleet, config, tails };
const PAGES = snapshot ? { result, ...LIVE } : { ...LIVE, runs };
const HOME = snapshot ? "result" : "alarms";
// A page asks again after two seconds at the earliest, and after ten times as long as it waited: it can
// take a small share of its server's time only.
const MIN_MILLIS = 2000;
const REST_OF_TIME = 10;
const main = document.getElementById("main");
let summary = null;
let stream = null;
let streamed = "";
let drawnAt = 0;
let pause = MIN_MILLIS;
let due = 0;
let drawing = false;
let again = false;
let isServerGone = false;
let shown = null;
let numAlarms = 0;
let known = [];

function theme() {
  const chosen = query().theme || remember("theme") || "auto";
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  return chosen;
}

function select(label, value, choices, onchange, name) {
  return h(
    "label",
    {},
    h("span", { class: "sr" }, label),
    h("select", { "aria-label": label, "data-focus": name, onchange: (event) => onchange(event.target.value) }, choices.map(([key, text]) => h("option", { value: key, selected: key === value }, text))),
  );
}

function statusBadge() {
  const kind = summary.status === "ended" ? (summary.succeeded ? "good" : "bad") : summary.status === "running" ? "good" : "warn";
  return h("span", { class: `badge ${kind}`, id: "status" }, t(`status_${summary.status}`));
}

function drawHead() {
  const run = query().run || "";
  const facts = summary
    ? [
        statusBadge(),
        summary.is_paused && h("span", { class: "badge warn" }, t("paused")),
        h("span", {}, `${t("step")} `, h("b", { id: "step" }, `${number(summary.step)}/${number(summary.num_steps)}`)),
        h("span", {}, `${t("version")} `, h("b", {}, number(summary.policy_version))),
        summary.reward !== null && h("span", {}, `${t("reward")} `, h("b", {}, number(summary.reward))),
        h("span", {}, h("b", { id: "num-samples" }, number(summary.num_samples)), ` ${t("samples_number")}`),
        summary.tokens_per_second !== null && h("span", {}, h("b", {}, number(Math.round(summary.tokens_per_second))), ` ${t("tokens_s")}`),
        summary.status === "running" && summary.remaining_seconds !== null && h("span", {}, `${t("remaining")} `, h("b", {}, duration(summary.remaining_seconds))),
      ]
    : [];
  const names = known.map((one) => one.run_id);
  if (run && !names.includes(run)) names.unshift(run);
  replace(
    document.getElementById("head"),
    h("a", { class: "brand", href: address({ page: "" }) }, "Relax Events"),
    select(t("run"), run, names.map((name) => [name, name]), (value) => go({ run: value, page: query().page }, { keep: ["lang", "theme"] }), "pick-run"),
    h("div", { class: "facts" }, facts.filter(Boolean)),
    select(t("theme"), theme(), [["auto", t("theme_auto")], ["light", t("theme_light")], ["dark", t("theme_dark")]], (value) => { remember("theme", value); go({ theme: value }, { keep: true }); }, "pick-theme"),
    h("button", { type: "button", lang: lang() === "zh" ? "en" : "zh", "data-focus": "pick-lang", onclick: () => { const next = lang() === "zh" ? "en" : "zh"; remember("lang", next); go({ lang: next }, { keep: true }); } }, t("language")),
  );
}

function drawNav() {
  const page = currentPage();
  const nav = document.getElementById("nav");
  nav.setAttribute("aria-label", t("pages"));
  replace(
    nav,
    Object.keys(PAGES).map((name) =>
      h("a", { href: address({ page: name === HOME ? "" : name }), "aria-current": name === page ? "page" : null, "data-focus": `nav-${name}` }, t(name), name === "alarms" && numAlarms > 0 && h("span", { class: "count" }, String(numAlarms))),
    ),
  );
}

function currentPage() {
  const page = query().page || HOME;
  return page in PAGES ? page : HOME;
}

function banners() {
  const found = [];
  if (snapshot) found.push(h("div", { class: "banner", id: "written" }, t("snapshot", { at: time(snapshot.written_at), count: number(snapshot.samples.rows.length), all: number(snapshot.samples.num_samples) })));
  const isOver = summary?.status === "ended";
  if (isServerGone) found.push(h("div", { class: isOver ? "banner" : "banner bad", role: "alert", id: "server-gone" }, t(isOver ? "server_gone_at_end" : "server_gone")));
  const reader = summary?.reader;
  if (reader?.trouble) found.push(h("div", { class: "banner bad", id: "trouble" }, t("reader_trouble", { since: time(reader.trouble_since * 1000), why: reader.trouble })));
  if (reader && !reader.is_caught_up && reader.num_old_versions_left > 0) found.push(h("div", { class: "banner" }, t("reading_older", { left: reader.num_old_versions_left, all: reader.num_old_versions })));
  if (reader?.num_unreadable) found.push(h("div", { class: "banner" }, t("unreadable", { count: reader.num_unreadable })));
  return found;
}

// What the page shows stays, for example when its server is gone.
function drawBanners() {
  replace(main, banners(), [...main.childNodes].filter((node) => !node.classList?.contains("banner")));
}

async function draw() {
  if (drawing) {
    again = true;
    return;
  }
  drawing = true;
  drawnAt = Date.now();
  const page = currentPage();
  const at = place();
  document.documentElement.lang = lang();
  document.querySelector(".skip").textContent = t("skip");
  document.title = `${t(page)} – ${query().run || "Relax Events"}`;
  drawHead();
  drawNav();
  try {
    const content = await PAGES[page].draw({ run: query().run, query: query(), summary, runs: known });
    pause = Math.max(MIN_MILLIS, REST_OF_TIME * (Date.now() - drawnAt));
    isServerGone = false;
    if (place() === at) {
      replace(main, banners(), h("h1", {}, t(page)), content);
      main.dataset.page = page;
      shown = at;
    }
  } catch (error) {
    if (!(error.status > 0)) isServerGone = true;
    if (place() === at && shown === at && !error.status) drawBanners();
    else if (place() === at) replace(main, banners(), h("h1", {}, t(page)), error.status ? h("div", { class: "banner bad", role: "alert" }, error.message) : h("p", {}, error.name === "TypeError" ? "" : String(error)));
    if (!error.status && error.name !== "TypeError") console.error(error);
  }
  drawing = false;
  if (again) {
    again = false;
    draw();
  }
}

function isInUse() {
  const active = document.activeElement;
  if (main.contains(active) && ["INPUT", "SELECT", "TEXTAREA"].includes(active.tagName)) return true;
  return !getSelection().isCollapsed && main.contains(getSelection().anchorNode);
}

// News redraws the page, the last one too: later where it was just drawn, or a form is being filled in;
// not where it is not seen, or stands still.
function refresh() {
  clearTimeout(due);
  if (document.hidden || PAGES[currentPage()].isStill?.(query())) return;
  const wait = drawnAt + pause - Date.now();
  if (drawing || wait > 0 || isInUse()) due = setTimeout(refresh, Math.max(wait, 500));
  else draw();
}

async function countAlarms() {
  if (!query().run || document.hidden) return;
  try {
    numAlarms = (await of(query().run, "alarms")).alarms.length;
    drawNav();
  } catch {
    numAlarms = 0;
  }
}

function follow(run) {
  if (streamed === run) return;
  stream?.close();
  if (summary?.run_id !== run) summary = snapshot && snapshot.summary;
  streamed = run;
  if (snapshot) return;
  stream = new EventSource(`/api/runs/${encodeURIComponent(run)}/events`);
  stream.addEventListener("news", (event) => {
    const first = summary === null;
    const before = summary;
    summary = JSON.parse(event.data);
    isServerGone = false;
    drawHead();
    if (before && before.status !== summary.status) document.getElementById("news").textContent = t("news", { step: summary.step, status: t(`status_${summary.status}`) });
    if (first || before.status !== summary.status || before.reader.is_caught_up !== summary.reader.is_caught_up || before.reader.trouble !== summary.reader.trouble) draw();
    else refresh();
  });
  stream.addEventListener("error", () => {
    if (!isServerGone) {
      isServerGone = true;
      drawBanners();
    }
    if (stream.readyState === EventSource.CLOSED) {
      streamed = "";
      setTimeout(() => !document.hidden && query().run && follow(query().run), 3000);
    }
  });
}

async function moved({ fresh = false } = {}) {
  if (fresh) forgetPlots();
  if (query().run && !document.hidden) follow(query().run);
  await draw();
}

addEventListener("moved", () => {
  forgetPlots();
  moved();
});
addEventListener("popstate", () => moved({ fresh: true }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/?'], a[href^='#?']");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  history.pushState(null, "", link.getAttribute("href"));
  forgetPlots();
  moved().then(() => {
    if (!link.closest("nav")) main.focus({ preventScroll: true });
    if (!link.dataset.stay) scrollTo(0, 0);
  });
});
document.addEventListener("visibilitychange", () => {
  if (snapshot) return;
  if (document.hidden) {
    stream?.close(); // a page that is not seen costs nothing
    streamed = "";
  } else moved();
});

async function listRuns() {
  try {
    const found = await get("runs");
    known = found.runs;
    return found;
  } catch {
    return { runs: known, first: "" };
  }
}

async function begin() {
  theme();
  drawHead();
  drawNav();
  const found = await listRuns();
  if (!query().run) {
    const first = found.first || found.runs[0]?.run_id;
    if (first) history.replaceState(null, "", address({ ...query(), ...(snapshot?.source && !query().run && { compare: snapshot.source.run_id }), run: first }, { keep: true }));
    else history.replaceState(null, "", address({ page: "runs" }));
  }
  await moved();
  countAlarms();
  if (snapshot) return;
  setInterval(countAlarms, 5000);
  setInterval(() => document.hidden || listRuns(), 30000);
}

begin();
