// @ts-check
/** Requests to the server. Every failure has a message that says what to do. */

/** A request that the server refused, with its message. */
export class Refused extends Error {
  /**
   * @param {string} sentence
   * @param {number} status
   */
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

/**
 * Requests `path` from the server, and returns its JSON response.
 * @param {(string|number)[]} path parts below /api
 * @param {Record<string, any>} [query] empty values are left out
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function get(path, query = {}, signal) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  const search = new URLSearchParams(kept.map(([name, value]) => [name, value === true ? "1" : String(value)])).toString();
  const url = `api/${path.map((part) => encodeURIComponent(String(part))).join("/")}${search ? `?${search}` : ""}`;
  return answered(await asked(url, signal));
}

/**
 * @param {string} url
 * @param {AbortSignal} [signal]
 */
async function asked(url, signal) {
  try {
    return await fetch(url, { signal, headers: { accept: "application/json" }, credentials: "same-origin" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused("The viewer does not respond. Start `agentgym view` again, and open the address that it prints.", 0);
  }
}

/** @param {Response} response */
async function answered(response) {
  if (response.ok) return response.json();
  const said = await response.text();
  throw new Refused(sentence(said) ?? `The viewer responded with ${response.status} to ${new URL(response.url).pathname}.`, response.status);
}

/** @param {string} said */
function sentence(said) {
  try {
    return JSON.parse(said).error ?? null;
  } catch {
    return said.length > 0 && said.length < 400 && !said.includes("<") ? said : null;
  }
}
