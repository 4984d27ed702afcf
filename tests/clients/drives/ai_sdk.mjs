// The AI SDK. The argument is its provider: openai-compatible (as in opencode), openai (Responses) or anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { embedder, expect, getWeather, key, model, run, seen, talk, talked, url, weather } from "./checking.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const compatible = createOpenAICompatible({ name: "mlxd", baseURL: `${url}/v1`, apiKey: key, includeUsage: true });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: key });
const named = { "openai-compatible": compatible, openai, anthropic }[process.argv[2]];
const tools = {
  get_weather: tool({
    description: "weather",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => getWeather(city),
  }),
};
const checks = {
  async text() {
    const { text } = await generateText({ model: named(model), prompt: talk, maxRetries: 0 });
    expect(text === talked, text);
  },
  async stream() {
    const result = streamText({ model: named(model), prompt: talk, maxRetries: 0 });
    let said = "";
    for await (const piece of result.textStream) said += piece;
    const usage = await result.usage;
    expect(said === talked && usage.outputTokens > 0, { said, usage });
  },
  async "tool round trip"() {
    const result = streamText({ model: named(model), prompt: weather, tools, stopWhen: stepCountIs(3), maxRetries: 0 });
    let said = "";
    for await (const piece of result.textStream) said += piece;
    expect(said.includes(seen), said);
  },
  async errors() {
    try {
      await generateText({ model: named("no-such-model"), prompt: talk, maxRetries: 0 });
    } catch (why) {
      return expect(APICallError.isInstance(why) && why.statusCode === 404, String(why));
    }
    throw new Error("an unknown model was served");
  },
};
if (named === compatible) {
  checks.embeddings = async () => {
    const { embeddings } = await embedMany({ model: compatible.textEmbeddingModel(embedder), values: ["one", "two"] });
    expect(embeddings.length === 2 && embeddings[0].length === 384, "not two vectors of 384 numbers");
  };
}
await run(checks);
