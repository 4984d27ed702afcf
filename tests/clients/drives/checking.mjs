// What every node drive shares: where the service is, and one line of JSON for each check.

const { MLXD_URL, MLXD_KEY, MLXD_MODEL, MLXD_EMBEDDER, MLXD_PROOF, MLXD_SEEN, MLXD_TALKED } = process.env;
export const url = MLXD_URL, key = MLXD_KEY, model = MLXD_MODEL, embedder = MLXD_EMBEDDER;
export const seen = MLXD_SEEN, talked = MLXD_TALKED;
export const talk = "ask:talk", weather = "ask:weather";
export const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const getWeather = (city) => (city === "Oslo" ? `4 degrees: ${MLXD_PROOF}` : "unknown city");

export function expect(holds, what) {
  if (!holds) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

export async function run(checks) {
  for (const [check, body] of Object.entries(checks)) {
    let verdict = "pass", detail = "";
    try {
      await body();
    } catch (why) {
      console.error(why);
      verdict = "fail";
      detail = `${why?.name}: ${why?.message}`.slice(0, 300);
    }
    console.log(JSON.stringify({ check, verdict, detail }));
  }
}
