export class NetworkError extends Error {}

export interface Progress {
  /** Bytes of the weights that are there. */
  loaded: number;
  /** All bytes, or null where the server does not say. */
  total: number | null;
}

export interface Output {
  /** A unit stands for `scale`. */
  values: Int32Array;
  shape: number[];
  scale: number;
}

export class Network {
  private constructor();
  static load(options?: {
    weights?: string | URL;
    module?: string | URL;
    progress?: (progress: Progress) => void;
  }): Promise<Network>;
  static from(code: BufferSource | WebAssembly.Module, content: Uint8Array): Promise<Network>;
  /** (images, channels, height, width) */
  readonly shape: number[];
  readonly outputs: string[];
  run(pixels: Uint8Array | Uint8ClampedArray): Record<string, Output>;
  close(): void;
}

export function largest(
  values: ArrayLike<number>,
  count: number,
  scale: number,
): { index: number; logit: number; probability: number }[];

export function planes(rgba: Uint8ClampedArray, channels: number): Uint8Array;
