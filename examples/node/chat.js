// Streams one answer from a gateway, and says how it ended. No generated code: the .proto files are read when it starts.
//
//   npm install && node chat.js 127.0.0.1:50051 "Why is the sky blue?"

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [address = "127.0.0.1:50051", question = "What is the capital of France?"] = process.argv.slice(2);
const protos = path.join(__dirname, "..", "..", "protos");
const definition = protoLoader.loadSync("tessera/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).tessera.v1;

const client = new InferenceService(address, grpc.credentials.createInsecure());
const generation = {
  chat: { messages: [{ role: "user", content: question }] },
  sampling: { temperature: 0, max_tokens: 64 },
  limits: { max_queue_ms: 30000 },
};
const call = client.StreamGenerate({ generation }, { deadline: Date.now() + 120000 });
process.once("SIGINT", () => call.cancel()); // which ends the request at the worker too

call.on("data", (piece) => {
  process.stdout.write(piece.text ?? "");
  if (piece.finish) {
    const { reason, usage } = piece.finish;
    console.error(`\n[${reason}; prompt ${usage.prompt_tokens} tokens, answer ${usage.completion_tokens} tokens]`);
  }
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("end", () => client.close());
