// Runs driver.c, compiled to WebAssembly, in node or in a browser.

/**
 * Run the program until it ends.
 * @param {WebAssembly.Module} module
 * @param {(bytes: Uint8Array) => number} read fills bytes with what comes next; returns how many there were, 0 at the end
 * @param {(bytes: Uint8Array, file: number) => void} write takes what the program writes to a file, 1 or 2
 * @returns {Promise<number>} its exit status
 */
export async function run(module, read, write) {
  const exit = { status: 0 };
  let memory;
  // of each piece of memory in a list of WASI: address and bytes
  const pieces = (list, count) => {
    const words = new Uint32Array(memory.buffer, list, 2 * count);
    return Array.from({ length: count }, (_, i) => new Uint8Array(memory.buffer, words[2 * i], words[2 * i + 1]));
  };
  const done = (place, bytes) => (new DataView(memory.buffer).setUint32(place, bytes, true), 0);
  const calls = {
    fd_read(_file, list, count, place) {
      let got = 0;
      for (const piece of pieces(list, count)) {
        const more = read(piece);
        got += more;
        if (more < piece.length) break;
      }
      return done(place, got);
    },
    fd_write(file, list, count, place) {
      let size = 0;
      for (const piece of pieces(list, count)) {
        write(piece, file);
        size += piece.length;
      }
      return done(place, size);
    },
    fd_fdstat_get: (_file, place) => (new Uint8Array(memory.buffer, place, 24).fill(0), 0),
    fd_close: () => 0,
    fd_seek: () => 70, // no file can be sought in
    proc_exit(status) {
      exit.status = status;
      throw exit;
    },
  };
  const wanted = WebAssembly.Module.imports(module).map(({ name }) => [name, calls[name] ?? (() => 52)]); // not supported
  const instance = await WebAssembly.instantiate(module, { wasi_snapshot_preview1: Object.fromEntries(wanted) });
  memory = instance.exports.memory;
  try {
    instance.exports._start();
  } catch (error) {
    if (error !== exit) throw error;
  }
  return exit.status;
}
