// @anthropic-ai/sdk: messages, streams, tools, errors.
import Anthropic from "@anthropic-ai/sdk";
import { expect, getWeather, key, model, run, schema, seen, talk, talked, url, weather } from "./checking.mjs";

const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const asked = (content) => ({ model, max_tokens: 500, messages: [{ role: "user", content }] });

await run({
  async text() {
    const answer = await client.messages.create(asked(talk));
    expect(answer.content[0].text === talked && answer.stop_reason === "end_turn", answer);
  },
  async stream() {
    const said = await client.messages.stream(asked(talk)).finalText();
    expect(said === talked, said);
  },
  async "tool round trip"() {
    const tools = [{ name: "get_weather", description: "weather", input_schema: schema }];
    const first = await client.messages.stream({ ...asked(weather), tools }).finalMessage();
    const call = first.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: getWeather(call.input.city) };
    const messages = [...asked(weather).messages, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
    const second = await client.messages.create({ ...asked(""), messages, tools });
    expect(second.content[0].text.includes(seen), second);
  },
  async errors() {
    try {
      await client.messages.create({ ...asked(talk), model: "no-such-model" });
    } catch (why) {
      return expect(why instanceof Anthropic.NotFoundError, String(why));
    }
    throw new Error("an unknown model was served");
  },
});
