// Numbers, times in the reader's zone, and durations.

import { lang, t } from "./strings.js";

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString(lang());
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString(lang(), size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export function time(millis) {
  if (!millis) return "–";
  const at = new Date(millis);
  const today = at.toDateString() === new Date().toDateString();
  return at.toLocaleString(lang(), today ? { timeStyle: "medium" } : { dateStyle: "medium", timeStyle: "medium" });
}

export function zone() {
  return Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(Math.round(seconds), 0);
  if (whole < 60) return t("seconds", { count: seconds < 10 ? Math.max(seconds, 0).toFixed(1) : whole });
  if (whole < 3600) return t("minutes", { count: Math.floor(whole / 60), rest: whole % 60 });
  return t("hours", { count: Math.floor(whole / 3600), rest: Math.floor((whole % 3600) / 60) });
}

// As long as the server's excerpts, with the mark that one was cut.
export function excerpt(text, length = 241) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length)}…` : line;
}

export function saveCsv(name, head, rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    let text = String(value);
    // a spreadsheet would run a text that begins so as a formula
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [head, ...rows].map((row) => row.map(cell).join(","));
  const url = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: `${name}.csv` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
