// Calls of this server; no other one is ever called. A snapshot has the answers in itself.

import { answerFrom, mediumFrom, snapshot } from "./snapshot.js";
import { t } from "./strings.js";

export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

const MAX_KEPT = 20;
const kept = new Map();

// Asks only for what changed: the server answers with a tag, and with 304 while the answer is the same.
async function getTagged(path) {
  const known = kept.get(path);
  const response = await fetch(path, known && { headers: { "If-None-Match": known.tag } });
  if (known && response.status === 304) return known.body;
  const body = await answer(response);
  const tag = response.headers.get("ETag");
  kept.delete(path);
  if (tag) kept.set(path, { tag, body });
  if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
  return body;
}

async function answer(response) {
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(response.status, body.error || body.message || response.statusText);
  return body;
}

export async function get(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  if (snapshot) return answerOfFile(path, Object.fromEntries(given));
  const text = new URLSearchParams(given).toString();
  return getTagged(`/api/${path}${text ? `?${text}` : ""}`);
}

function answerOfFile(path, given) {
  const found = answerFrom(path, given);
  if (!found || found.refusal) throw new ApiError(404, found?.refusal || t("not_in_snapshot"));
  return found;
}

export function mediumAddress(run, given) {
  return snapshot ? mediumFrom(given) : `/api/runs/${encodeURIComponent(run)}/media?${new URLSearchParams(given)}`;
}

export function of(run, path, parameters) {
  return get(`runs/${encodeURIComponent(run)}/${path}`, parameters);
}

export async function post(run, path, body, token) {
  if (snapshot) throw new ApiError(409, t("not_in_snapshot"));
  return answer(
    await fetch(`/api/runs/${encodeURIComponent(run)}/${path}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
      body: JSON.stringify(body),
    }),
  );
}

let token = "";
export function keptToken(value) {
  if (value !== undefined) token = value;
  return token;
}
