// openai for node: chat, Responses, embeddings, errors.
import OpenAI from "openai";
import { embedder, expect, getWeather, key, model, run, schema, seen, talk, talked, url, weather } from "./checking.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const described = { name: "get_weather", description: "weather", parameters: schema };

await run({
  async text() {
    const answer = await client.chat.completions.create({ model, messages: [{ role: "user", content: talk }] });
    expect(answer.choices[0].message.content === talked, answer);
  },
  async stream() {
    let said = "";
    const chunks = await client.chat.completions.create({ model, messages: [{ role: "user", content: talk }], stream: true });
    for await (const chunk of chunks) said += chunk.choices[0]?.delta.content ?? "";
    expect(said === talked, said);
  },
  async "tool round trip"() {
    // The SDK's own loop: it parses the arguments, calls the function and sends the result.
    const runner = client.chat.completions.runTools({
      model,
      stream: true,
      messages: [{ role: "user", content: weather }],
      tools: [{ type: "function", function: { ...described, parse: JSON.parse, function: ({ city }) => getWeather(city) } }],
    });
    const said = await runner.finalContent();
    expect(said.includes(seen), said);
  },
  async responses() {
    const input = [{ role: "user", content: weather }];
    const tools = [{ type: "function", strict: false, ...described }];
    const first = await client.responses.stream({ model, input, tools, store: false }).finalResponse();
    const call = first.output.find((item) => item.type === "function_call");
    input.push({ type: "function_call", call_id: call.call_id, name: call.name, arguments: call.arguments });
    input.push({ type: "function_call_output", call_id: call.call_id, output: getWeather(JSON.parse(call.arguments).city) });
    const second = await client.responses.create({ model, input, tools, store: false });
    expect(second.output_text.includes(seen), second);
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: embedder, input: ["one", "two"] });
    expect(answer.data.length === 2 && answer.data[0].embedding.length === 384, "not two vectors of 384 numbers");
  },
  async errors() {
    try {
      await client.chat.completions.create({ model: "no-such-model", messages: [{ role: "user", content: talk }] });
    } catch (why) {
      return expect(why instanceof OpenAI.NotFoundError && why.code === "model_not_found", String(why));
    }
    throw new Error("an unknown model was served");
  },
});
