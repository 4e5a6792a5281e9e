// The vendors' Node libraries with nothing changed but base URL and key: one JSON object on stdout, surface -> result.
//   node surfaces.mjs GATEWAY_URL MODULES_DIR      key: TOLLHOUSE_KEY
import { createRequire } from "node:module";
import path from "node:path";

const [, , url, modules] = process.argv;
const require = createRequire(path.join(modules, "x.js"));
const { OpenAI } = require("openai");
const { Anthropic } = require("@anthropic-ai/sdk");

const apiKey = process.env.TOLLHOUSE_KEY;
const gpt = new OpenAI({ baseURL: `${url}/v1`, apiKey });
const claude = new Anthropic({ baseURL: url, apiKey });
const strange = new OpenAI({ baseURL: `${url}/v1`, apiKey: "sk-of-somebody" });
const taskGpt = new OpenAI({ baseURL: `${url}/t/node-task/v1`, apiKey });
const taskClaude = new Anthropic({ baseURL: url, apiKey, defaultHeaders: { "X-Task-Id": "node-task" } });

const [GPT, CLAUDE, EMBED] = ["gpt-5", "claude-opus-5-5", "text-embedding-3-small"];
const messages = [{ role: "user", content: "Say hello." }];
const parameters = { type: "object", properties: { command: { type: "string" } }, required: ["command"] };
const chatTools = [{ type: "function", function: { name: "bash", parameters } }];
const messagesTools = [{ name: "bash", input_schema: parameters }];
const verdict = { type: "object", properties: { passed: { type: "boolean" } }, required: ["passed"] };

const failure = async (call) => {
  try {
    await call();
    return "no error";
  } catch (e) {
    return [e.constructor.name, e.status, e.code ?? e.error?.error?.type];
  }
};

const surfaces = {
  chat: async () => {
    const plain = await gpt.chat.completions.create({ model: GPT, messages });
    let text = "";
    let usage;
    const stream_options = { include_usage: true };
    for await (const chunk of await gpt.chat.completions.create({ model: GPT, messages, stream: true, stream_options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return [text.slice(0, 7), text === plain.choices[0].message.content, usage.total_tokens === plain.usage.total_tokens];
  },
  tools: async () => {
    const said = (await gpt.chat.completions.create({ model: GPT, messages, tools: chatTools })).choices[0].message;
    const [call] = said.tool_calls;
    const told = [...messages, said, { role: "tool", tool_call_id: call.id, content: "hi" }];
    const end = await gpt.chat.completions.stream({ model: GPT, messages: told, tools: chatTools }).finalChatCompletion();
    return [call.function.name, call.function.arguments, end.choices[0].finish_reason];
  },
  structured: async () => {
    const json_schema = { name: "verdict", strict: true, schema: verdict };
    const response_format = { type: "json_schema", json_schema };
    return (await gpt.chat.completions.parse({ model: GPT, messages, response_format })).choices[0].message.parsed;
  },
  responses: async () => {
    const plain = await gpt.responses.create({ model: GPT, input: "Say hello." });
    const kinds = [];
    const stream = gpt.responses.stream({ model: GPT, input: "Say hello." });
    for await (const event of stream) kinds.push(event.type);
    const final = await stream.finalResponse();
    return [kinds.at(-1), final.status, final.output_text === plain.output_text];
  },
  embeddings: async () => (await gpt.embeddings.create({ model: EMBED, input: ["a", "b"] })).data.map((row) => row.embedding.length),
  models: async () => {
    const both = [await gpt.models.list(), await claude.models.list()];
    return both.map((page) => page.data.map((model) => model.id));
  },
  messages: async () => {
    const plain = await claude.messages.create({ model: CLAUDE, max_tokens: 500, messages });
    const final = await claude.messages.stream({ model: CLAUDE, max_tokens: 500, messages }).finalMessage();
    const counted = await claude.messages.countTokens({ model: CLAUDE, messages });
    return [final.stop_reason, final.content[0].text === plain.content[0].text, counted.input_tokens === plain.usage.input_tokens];
  },
  messagesTools: async () => {
    const said = await claude.messages.create({ model: CLAUDE, max_tokens: 500, messages, tools: messagesTools });
    const [call] = said.content;
    const result = { type: "tool_result", tool_use_id: call.id, content: "hi" };
    const told = [...messages, { role: "assistant", content: said.content }, { role: "user", content: [result] }];
    const end = await claude.messages.stream({ model: CLAUDE, max_tokens: 500, messages: told, tools: messagesTools }).finalMessage();
    return [said.stop_reason, call.name, call.input, end.stop_reason];
  },
  task: async () => {
    const byPath = await taskGpt.chat.completions.create({ model: GPT, messages }).withResponse();
    const byHeader = await taskClaude.messages.create({ model: CLAUDE, max_tokens: 5, messages }).withResponse();
    return byPath.response.headers.get("x-task-id") === byHeader.response.headers.get("x-task-id");
  },
  wrongKey: () => failure(() => strange.chat.completions.create({ model: GPT, messages })),
  unknownModel: () => failure(() => claude.messages.create({ model: "claude-9", max_tokens: 5, messages })),
};

const results = {};
for (const [name, run] of Object.entries(surfaces)) {
  try {
    results[name] = await run();
  } catch (e) {
    results[name] = `failed: ${e.constructor.name}: ${e.message}`;
  }
}
console.log(JSON.stringify(results));
