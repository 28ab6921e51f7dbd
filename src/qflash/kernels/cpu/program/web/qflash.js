/* Runs a network that qflash.export_web wrote, in browsers and node: uint8 pixels in, int32 outputs out, bit for bit those of
 * Python. No dependencies.
 *
 *     import { Network } from "./qflash.js";
 *     const network = await Network.load({ progress: ({ loaded, total }) => console.log(loaded, total) });
 *     const { output } = network.run(pixels); // pixels: Uint8Array, (images, channels, height, width) as network.shape says
 *     console.log(output.values, output.shape, output.scale);
 *     network.close();
 */

const LINE = 64; // the file has to begin at a multiple of it
const TENSOR_BYTES = 56; // of qflash_tensor: two pointers, dimensions, four sizes, scale

/** What went wrong in a network: a damaged file, too little memory, wrong pixels. */
export class NetworkError extends Error {
  name = "NetworkError";
}

/** Gives a file's content in pieces, and its length or null where the server does not say it. */
async function open(url) {
  if (url.protocol === "file:") {
    const { open } = await import("node:fs/promises");
    const file = await open(url);
    return { total: (await file.stat()).size, pieces: file.createReadStream({ highWaterMark: 1 << 20 }) };
  }
  const answer = await fetch(url);
  if (!answer.ok) throw new NetworkError(`${url.href}: ${answer.status} ${answer.statusText}`);
  // of a compressed answer the length is not that of the content
  const length = answer.headers.get("content-encoding") ? null : answer.headers.get("content-length");
  return { total: length === null ? null : Number(length), pieces: pieces(answer.body) };
}

async function* pieces(stream) {
  const reader = stream.getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
}

async function bytesOf(url, progress = () => {}) {
  const { total, pieces } = await open(url);
  const found = [];
  let loaded = 0;
  for await (const piece of pieces) {
    found.push(piece);
    loaded += piece.length;
    progress({ loaded, total });
  }
  const all = new Uint8Array(loaded);
  let at = 0;
  for (const piece of found) {
    all.set(piece, at);
    at += piece.length;
  }
  return all;
}

export class Network {
  #c;
  #handle = 0;
  #file = 0;
  #pixels = 0;
  #outputs = [];

  /**
   * Loads a network.
   * @param {object} [options]
   * @param {string|URL} [options.weights] address of network.bin; the one beside this module unless given
   * @param {string|URL} [options.module] address of qflash.wasm; the one beside this module unless given
   * @param {({loaded, total}) => void} [options.progress] is told the bytes of the weights that are there, and of all: null if
   *     the server does not say it
   * @returns {Promise<Network>}
   * @throws {NetworkError} a file is not there, damaged, or there is too little memory
   */
  static async load({ weights = "network.bin", module = "qflash.wasm", progress } = {}) {
    const [code, content] = await Promise.all([
      bytesOf(new URL(module, import.meta.url)),
      bytesOf(new URL(weights, import.meta.url), progress),
    ]);
    return Network.from(code, content);
  }

  /**
   * Makes a network of files' contents.
   * @param {BufferSource|WebAssembly.Module} code of qflash.wasm
   * @param {Uint8Array} content of network.bin
   * @returns {Promise<Network>}
   * @throws {NetworkError} the content is damaged, or there is too little memory
   */
  static async from(code, content) {
    if (!(content instanceof Uint8Array)) throw new TypeError("content must be a Uint8Array");
    const made = await WebAssembly.instantiate(code, {});
    return new Network((made.instance ?? made).exports, content);
  }

  constructor(c, content) {
    this.#c = c;
    c._initialize?.();
    this.#file = this.#reserve(content.length + LINE);
    const begin = this.#file + ((LINE - (this.#file % LINE)) % LINE);
    this.#bytes(begin, content.length).set(content);
    const place = this.#reserve(TENSOR_BYTES);
    this.#check(c.qflash_open_memory(begin, BigInt(content.length), place));
    this.#handle = this.#view(place).getUint32(0, true);
    /** (images, channels, height, width) of the pixels */
    this.shape = this.#sizes(c.qflash_images(this.#handle), 4);
    this.#pixels = this.#reserve(this.#count);
    for (let i = 0n; i < c.qflash_outputs(this.#handle); i++) {
      c.qflash_output(place, this.#handle, i);
      const tensor = this.#view(place);
      this.#outputs.push({
        name: this.#text(tensor.getUint32(0, true)),
        values: tensor.getUint32(4, true),
        shape: this.#sizes(place + 16, Number(tensor.getBigInt64(8, true))),
        scale: tensor.getFloat64(48, true),
      });
    }
    c.free(place);
  }

  /** Names of the outputs. */
  get outputs() {
    return this.#outputs.map(({ name }) => name);
  }

  /**
   * Computes the outputs of images.
   * @param {Uint8Array|Uint8ClampedArray} pixels (images, channels, height, width), as `shape` says
   * @returns {Object<string, {values: Int32Array, shape: number[], scale: number}>} by the outputs' names; a unit of `values`
   *     stands for `scale`
   * @throws {TypeError} pixels are of another type
   * @throws {RangeError} there are more or fewer
   * @throws {NetworkError} there is too little memory, or the network was closed
   */
  run(pixels) {
    if (!this.#handle) throw new NetworkError("the network was closed");
    if (!(pixels instanceof Uint8Array || pixels instanceof Uint8ClampedArray))
      throw new TypeError("pixels must be a Uint8Array or Uint8ClampedArray");
    if (pixels.length !== this.#count)
      throw new RangeError(`pixels must be ${this.#count} numbers (${this.shape.join(" x ")}), got ${pixels.length}`);
    this.#bytes(this.#pixels, this.#count).set(pixels);
    this.#check(this.#c.qflash_compute(this.#handle, this.#pixels));
    return Object.fromEntries(
      this.#outputs.map(({ name, values, shape, scale }) => {
        const size = shape.reduce((a, b) => a * b, 1);
        return [name, { values: new Int32Array(this.#c.memory.buffer, values, size).slice(), shape: [...shape], scale }];
      }),
    );
  }

  /** Gives the memory back. */
  close() {
    if (!this.#handle) return;
    this.#c.qflash_close(this.#handle);
    this.#c.free(this.#file);
    this.#c.free(this.#pixels);
    this.#handle = 0;
  }

  get #count() {
    return this.shape.reduce((a, b) => a * b, 1);
  }

  #reserve(bytes) {
    const place = this.#c.malloc(bytes) >>> 0;
    if (!place) throw new NetworkError("not enough memory");
    return place;
  }

  #check(failed) {
    if (failed) throw new NetworkError(this.#text(this.#c.qflash_message(failed)));
  }

  // made anew: the memory's buffer is another one once it has grown
  #view(place) {
    return new DataView(this.#c.memory.buffer, place);
  }

  #bytes(place, count) {
    return new Uint8Array(this.#c.memory.buffer, place, count);
  }

  #sizes(place, count) {
    return Array.from(new BigInt64Array(this.#c.memory.buffer, place, count), Number);
  }

  #text(place) {
    const rest = new Uint8Array(this.#c.memory.buffer, place);
    return new TextDecoder().decode(rest.subarray(0, rest.indexOf(0)));
  }
}

/**
 * Gives the largest outputs of a row of logits.
 * @param {ArrayLike<number>} values
 * @param {number} count
 * @param {number} scale of a unit
 * @returns {{index: number, logit: number, probability: number}[]} largest first
 */
export function largest(values, count, scale) {
  const logits = Array.from(values, (x) => x * scale);
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const total = logits.reduce((a, b) => a + Math.exp(b - most), 0);
  const order = logits.map((_, index) => index).sort((a, b) => values[b] - values[a] || a - b);
  return order.slice(0, count).map((index) => ({ index, logit: logits[index], probability: Math.exp(logits[index] - most) / total }));
}

/**
 * Turns the pixels of a canvas into those of a network.
 * @param {Uint8ClampedArray} rgba (height, width, 4)
 * @param {number} channels 3, or 1 for grey (ITU-R 601's weights)
 * @returns {Uint8Array} (channels, height, width)
 */
export function planes(rgba, channels) {
  const size = rgba.length / 4;
  const out = new Uint8Array(channels * size);
  for (let i = 0; i < size; i++) {
    const [red, green, blue] = [rgba[4 * i], rgba[4 * i + 1], rgba[4 * i + 2]];
    if (channels === 1) out[i] = Math.round(0.299 * red + 0.587 * green + 0.114 * blue);
    else {
      out[i] = red;
      out[size + i] = green;
      out[2 * size + i] = blue;
    }
  }
  return out;
}
