// Calls of this server; no other one is ever called.

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
  const text = new URLSearchParams(given).toString();
  return answer(await fetch(`/api/${path}${text ? `?${text}` : ""}`));
}

export function of(run, path, parameters) {
  return get(`runs/${encodeURIComponent(run)}/${path}`, parameters);
}

export async function post(run, path, body, token) {
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
