/* Included before network.c and attention.c where a program has them for several instruction sets: compiled with -DPATH=dot the
 * functions' names end with _dot. */
#define JOINED_(name, path) name##_##path
#define JOINED(name, path) JOINED_(name, path)

#define qflash_attention JOINED(qflash_attention, PATH)
#define qflash_attention_at JOINED(qflash_attention_at, PATH)
#define qflash_bias JOINED(qflash_bias, PATH)
#define qflash_float_attention JOINED(qflash_float_attention, PATH)
#define qflash_gated JOINED(qflash_gated, PATH)
#define qflash_layer_norm JOINED(qflash_layer_norm, PATH)
#define qflash_linear JOINED(qflash_linear, PATH)
#define qflash_mean JOINED(qflash_mean, PATH)
#define qflash_move_rows JOINED(qflash_move_rows, PATH)
#define qflash_narrow JOINED(qflash_narrow, PATH)
#define qflash_pack JOINED(qflash_pack, PATH)
#define qflash_packed_bytes JOINED(qflash_packed_bytes, PATH)
#define qflash_patches JOINED(qflash_patches, PATH)
#define qflash_quantize JOINED(qflash_quantize, PATH)
#define qflash_rotary JOINED(qflash_rotary, PATH)
#define qflash_run JOINED(qflash_run, PATH)
#define qflash_seen JOINED(qflash_seen, PATH)
#define qflash_varlen_attention JOINED(qflash_varlen_attention, PATH)
