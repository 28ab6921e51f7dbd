/* Times a network of qflash.export_web in node beside onnxruntime-web's float, one thread each, by turns, and prints JSON:
 *
 *     npm install onnxruntime-web
 *     node browser.mjs PAGE FLOAT.onnx > browser.json
 *
 * PAGE is the folder that export_web wrote, FLOAT.onnx the float model, of one image. Times are the process's, user and system: what
 * other programs take is not counted. */
import { readFileSync, statSync } from "node:fs";
import os from "node:os";
import path from "node:path";
import { pathToFileURL } from "node:url";
import { gzipSync } from "node:zlib";
import * as ort from "onnxruntime-web";

const [page, model] = process.argv.slice(2);
const { Network } = await import(pathToFileURL(path.resolve(page, "qflash.js")));
const network = await Network.load();
const pixels = new Uint8Array(readFileSync(path.join(page, "example.bin")));

ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
const numbers = Float32Array.from(pixels, (x) => (x - 128) / 64);
const given = { [session.inputNames[0]]: new ort.Tensor("float32", numbers, network.shape) };

async function milliseconds(action) {
  const begin = process.cpuUsage();
  await action();
  const { user, system } = process.cpuUsage(begin);
  return (user + system) / 1000;
}

const median = (times) => [...times].sort((a, b) => a - b)[times.length >> 1];
const times = { qflash: [], onnxruntime_web: [] };
for (let i = 0; i < 45; i++) {
  const pair = [await milliseconds(() => network.run(pixels)), await milliseconds(() => session.run(given))];
  if (i < 5) continue; // engines compile what runs often a second time
  times.qflash.push(pair[0]);
  times.onnxruntime_web.push(pair[1]);
}
const wasm = path.join(page, "qflash.wasm");
const result = {
  cpu: os.cpus()[0].model,
  node: process.version,
  onnxruntime_web: ort.env.versions.web,
  date: new Date().toISOString().slice(0, 10),
  runs: times.qflash.length,
  milliseconds: Object.fromEntries(Object.entries(times).map(([k, x]) => [k, { median: median(x), least: Math.min(...x) }])),
  ratio_of_medians: median(times.onnxruntime_web) / median(times.qflash),
  bytes: {
    qflash_wasm: statSync(wasm).size,
    qflash_wasm_gzip: gzipSync(readFileSync(wasm), { level: 9 }).length,
    qflash_js: statSync(path.join(page, "qflash.js")).size,
    network: statSync(path.join(page, "network.bin")).size,
    float_onnx: statSync(model).size,
  },
};
console.log(JSON.stringify(result, null, 1));
