// Calls of this server; no other one is ever called. A snapshot has the answers in itself.

import { answerFrom, mediumFrom, snapshot } from "./snapshot.js";
import { t } from "./strings.js";

export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
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
  return answer(await fetch(`/api/${path}${text ? `?${text}` : ""}`));
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
