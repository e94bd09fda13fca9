/**
 * Requests to the server and its answers.
 *
 * Input: a path and parameters. Output: the JSON object, or for the heat map a header and
 * its bytes. A refusal becomes an ApiError with the server's message.
 */

/** An error with the server's message and HTTP status; status 0 if it did not answer. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, params = {}, signal = undefined) {
  const query = new URLSearchParams(
    Object.entries(params).filter(([, value]) => value !== null && value !== undefined),
  );
  const text = query.size ? `${path}?${query}` : path;
  let answer;
  try {
    answer = await fetch(text, { signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is mjax.observe serve still running?", 0);
  }
  if (answer.ok) return answer;
  throw new ApiError(await reason(answer), answer.status);
}

async function reason(answer) {
  const text = (await answer.text()).slice(0, 2000);
  try {
    return JSON.parse(text).error || text;
  } catch {
    return text || `status ${answer.status}`;
  }
}

/** Request a JSON object: `get("metrics", {points: 2000})`. */
export async function get(name, params = {}, signal = undefined) {
  return (await ask(`api/${name}`, params, signal)).json();
}

/** Request a phase of the heat map: {header, cells: Uint8Array of [ranks, steps]}. */
export async function getHeat(params, signal = undefined) {
  const data = await (await ask("api/heat", params, signal)).arrayBuffer();
  return splitHeat(data);
}

/** Split an answer into its header and cells: 4 bytes of length, JSON, one byte a cell. */
export function splitHeat(data) {
  const length = new DataView(data).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  const cells = new Uint8Array(data, 4 + length);
  const expected = header.ranks.length * header.steps.length;
  if (cells.length !== expected) {
    throw new ApiError(`the heat map has ${cells.length} cells, not ${expected}`, 200);
  }
  return { header, cells };
}
