// A page that was written into a file: the answers of the server lie in it, and nothing is asked for.

const element = document.getElementById("snapshot");
export const snapshot = element ? JSON.parse(element.textContent) : null;

const SPANS = { reward: "reward", tokens: "tokens", staleness: "staleness", version: "policy_version", step: "train_step" };
const SORTS = { ...SPANS, time: "at" };
const EXACT = { outcome: "outcome", finish: "finish", source: "source", worker: "worker", group: "prompt_group_id" };

// A span as the server takes it: a number, 0.5.., ..0.2 or 3..7; null where it is none.
function span(text) {
  const [low, high] = text.includes("..") ? text.split("..") : [text, text];
  const bounds = [low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high)];
  return bounds.some(Number.isNaN) ? null : bounds;
}

function samples(given) {
  let rows = snapshot.samples.rows;
  for (const [name, field] of Object.entries(EXACT)) if (given[name]) rows = rows.filter((row) => row[field] === given[name]);
  for (const [name, field] of Object.entries(SPANS)) {
    if (!given[name]) continue;
    const bounds = span(given[name]);
    if (!bounds) return { refusal: `${name}: ${given[name]}` };
    rows = rows.filter((row) => row[field] !== null && row[field] >= bounds[0] && row[field] <= bounds[1]);
  }
  const sort = given.sort || "-time";
  const field = SORTS[sort.replace(/^-/, "")] || "at";
  const turn = sort.startsWith("-") ? -1 : 1;
  const sorted = [...rows].sort((a, b) => (a[field] === null ? 1 : b[field] === null ? -1 : turn * (a[field] - b[field])));
  const first = Number(given.first) || 0;
  return { ...snapshot.samples, rows: sorted.slice(first, first + Number(given.count || 50)), num_matching: sorted.length };
}

function lineage(given) {
  if (given.sample_id) return null;
  const version = Number(given.version) >= 0 && given.version ? given.version : snapshot.newest_version;
  const found = snapshot.versions[version];
  return found && { version: found, newest: snapshot.newest_version };
}

function sample(given) {
  const row = given.sample_id ? snapshot.samples.rows.find((one) => one.sample_id === given.sample_id)?.row : given.row;
  return snapshot.details[row];
}

function texts(given) {
  const wanted = given.rows.split(",").filter((row) => row in snapshot.texts);
  return Object.fromEntries(wanted.map((row) => [row, snapshot.texts[row]]));
}

// What the server would answer; null where the file does not hold it.
export function answerFrom(path, given) {
  const parts = path.split("/").map(decodeURIComponent);
  if (parts[0] === "runs" && parts.length === 1) return { runs: [row()], first: snapshot.run_id };
  if (parts[0] === "runbooks") return snapshot.runbooks[parts[1]] && { text: snapshot.runbooks[parts[1]] };
  const [, run, name, id] = parts;
  if (run !== snapshot.run_id) return run === snapshot.source?.run_id && name === "overview" ? snapshot.source.overview : null;
  if (id) return snapshot.dead_letters[id];
  if (name === "timeline") return snapshot.timeline[given.seconds || 120];
  const asked = { samples, lineage, sample, texts }[name];
  return asked ? asked(given) : snapshot[name];
}

function row() {
  const { run_id, status, step, policy_version, reward } = snapshot.summary;
  return { run_id, status, step, policy_version, reward, started_at: 0, source: "", num_records: snapshot.summary.num_samples };
}

export function mediumFrom(given) {
  return snapshot.media[`${given.row}/${given.number}`] || "";
}
