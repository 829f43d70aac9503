"""What this project declares of libllama's C interface: the functions it calls and the structs that cross it.

Only builds whose layout was seen are declared. A library is judged against every layout by `superfluid.llama.proof`
before anything that takes a struct is called.
"""

import attrs
import cffi

TYPES = """
typedef int32_t llama_token;
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;
struct llama_model;
struct llama_context;
struct llama_vocab;
typedef struct llama_memory_i *llama_memory_t;
typedef struct ggml_backend_device *ggml_backend_dev_t;
typedef struct ggml_backend_reg *ggml_backend_reg_t;
typedef void (*ggml_log_callback)(int level, const char *text, void *user_data);

struct llama_batch {
    int32_t n_tokens;
    llama_token *token;
    float *embd;
    llama_pos *pos;
    int32_t *n_seq_id;
    llama_seq_id **seq_id;
    int8_t *logits;
};
"""

MODEL_PARAMS = """
struct llama_model_params {
    ggml_backend_dev_t *devices;
    const void *tensor_buft_overrides;
    int32_t n_gpu_layers;
    int split_mode;
    int load_mode;
    int lazy_mode;
    int32_t main_gpu;
    const float *tensor_split;
    void *progress_callback;
    void *progress_callback_user_data;
    const void *kv_overrides;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
};
"""

_CONTEXT_PARAMS = """
struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t n_threads;
    int32_t n_threads_batch;
    int ctx_type;
    int rope_scaling_type;
    int pooling_type;
    int attention_type;
    int flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *cb_eval;
    void *cb_eval_user_data;
    int type_k;
    int type_v;
    %s
    void *abort_callback;
    void *abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    void *samplers;
    size_t n_samplers;
    struct llama_context *ctx_other;
};
"""

MODEL_DEFAULTS = "llama_model_default_params"
CONTEXT_DEFAULTS = "llama_context_default_params"

FUNCTIONS = {
    MODEL_DEFAULTS: "struct llama_model_params {}(void)",
    CONTEXT_DEFAULTS: "struct llama_context_params {}(void)",
    "llama_log_set": "void {}(ggml_log_callback callback, void *user_data)",
    "llama_backend_init": "void {}(void)",
    "llama_max_devices": "size_t {}(void)",
    "llama_model_load_from_file": "struct llama_model *{}(const char *path, struct llama_model_params params)",
    "llama_model_free": "void {}(struct llama_model *model)",
    "llama_model_get_vocab": "const struct llama_vocab *{}(const struct llama_model *model)",
    "llama_model_meta_val_str": "int32_t {}(const struct llama_model *model, const char *key, char *out, size_t size)",
    "llama_model_chat_template": "const char *{}(const struct llama_model *model, const char *name)",
    "llama_model_is_recurrent": "bool {}(const struct llama_model *model)",
    "llama_model_is_hybrid": "bool {}(const struct llama_model *model)",
    "llama_model_n_embd": "int32_t {}(const struct llama_model *model)",
    "llama_model_n_head": "int32_t {}(const struct llama_model *model)",
    "llama_model_n_head_kv": "int32_t {}(const struct llama_model *model)",
    "llama_model_n_layer": "int32_t {}(const struct llama_model *model)",
    "llama_init_from_model": "struct llama_context *{}(struct llama_model *model, struct llama_context_params params)",
    "llama_free": "void {}(struct llama_context *context)",
    "llama_n_ctx_seq": "uint32_t {}(const struct llama_context *context)",
    "llama_n_batch": "uint32_t {}(const struct llama_context *context)",
    "llama_n_ubatch": "uint32_t {}(const struct llama_context *context)",
    "llama_n_seq_max": "uint32_t {}(const struct llama_context *context)",
    "llama_decode": "int32_t {}(struct llama_context *context, struct llama_batch batch)",
    "llama_synchronize": "void {}(struct llama_context *context)",
    "llama_get_logits": "float *{}(struct llama_context *context)",
    "llama_get_memory": "llama_memory_t {}(const struct llama_context *context)",
    "llama_memory_clear": "void {}(llama_memory_t memory, bool data)",
    "llama_memory_seq_rm": "bool {}(llama_memory_t memory, llama_seq_id seq, llama_pos start, llama_pos end)",
    "llama_memory_seq_cp": (
        "void {}(llama_memory_t memory, llama_seq_id source, llama_seq_id target, llama_pos start, llama_pos end)"
    ),
    "llama_memory_seq_pos_max": "llama_pos {}(llama_memory_t memory, llama_seq_id seq)",
    "llama_state_seq_get_size": "size_t {}(struct llama_context *context, llama_seq_id seq)",
    "llama_state_seq_get_data": (
        "size_t {}(struct llama_context *context, uint8_t *out, size_t size, llama_seq_id seq)"
    ),
    "llama_state_seq_set_data": (
        "size_t {}(struct llama_context *context, const uint8_t *data, size_t size, llama_seq_id seq)"
    ),
    "llama_vocab_n_tokens": "int32_t {}(const struct llama_vocab *vocab)",
    "llama_vocab_get_text": "const char *{}(const struct llama_vocab *vocab, llama_token token)",
    "llama_vocab_get_attr": "int {}(const struct llama_vocab *vocab, llama_token token)",
    "llama_vocab_is_eog": "bool {}(const struct llama_vocab *vocab, llama_token token)",
    "llama_vocab_bos": "llama_token {}(const struct llama_vocab *vocab)",
    "llama_vocab_eos": "llama_token {}(const struct llama_vocab *vocab)",
    "llama_tokenize": (
        "int32_t {}(const struct llama_vocab *vocab, const char *text, int32_t length, llama_token *out, int32_t size,"
        " bool add_special, bool parse_special)"
    ),
    "llama_token_to_piece": (
        "int32_t {}(const struct llama_vocab *vocab, llama_token token, char *out, int32_t size, int32_t lstrip,"
        " bool special)"
    ),
    "ggml_backend_reg_count": "size_t {}(void)",
    "ggml_backend_load_all_from_path": "void {}(const char *directory)",
    "ggml_backend_dev_count": "size_t {}(void)",
    "ggml_backend_dev_get": "ggml_backend_dev_t {}(size_t index)",
    "ggml_backend_dev_name": "const char *{}(ggml_backend_dev_t device)",
    "ggml_backend_dev_description": "const char *{}(ggml_backend_dev_t device)",
    "ggml_backend_dev_memory": "void {}(ggml_backend_dev_t device, size_t *free, size_t *total)",
    "ggml_backend_dev_type": "int {}(ggml_backend_dev_t device)",
    "ggml_backend_dev_backend_reg": "ggml_backend_reg_t {}(ggml_backend_dev_t device)",
    "ggml_backend_reg_name": "const char *{}(ggml_backend_reg_t registry)",
}
"""Every function that is called, name to C prototype; a library that lacks one is refused."""

VERSION_FUNCTION = "llama_version"
OPTIONAL_FUNCTIONS = {VERSION_FUNCTION: "const char *{}(void)"}
"""Functions that tested builds may lack."""


@attrs.frozen
class Layout:
    """One layout of the structs, as `builds` of llama.cpp have them; `context` is the C text of the parameters."""

    builds: str
    context: str

    def declare(self) -> cffi.FFI:
        """An FFI that knows this layout and every function."""
        ffi = cffi.FFI()
        prototypes = {**FUNCTIONS, **OPTIONAL_FUNCTIONS}
        ffi.cdef(
            TYPES
            + MODEL_PARAMS
            + self.context
            + "".join(f"{text.format(name)};\n" for name, text in prototypes.items())
        )
        return ffi


LAYOUTS = (
    Layout("b11284 to b11479", _CONTEXT_PARAMS % ""),
    Layout("b11480 and later", _CONTEXT_PARAMS % "size_t moe_cache_size;"),
)
"""Layouts a library may have; the first that fits is used, the first is what a refusal compares with."""

EXPECTED_CONTEXT = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_threads": 4,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "cb_eval": 0,
    "type_k": 1,
    "type_v": 1,
    "abort_callback": 0,
    "embeddings": 0,
    "offload_kqv": 1,
    "samplers": 0,
    "n_samplers": 0,
    "ctx_other": 0,
}
EXPECTED_MODEL = {
    "devices": 0,
    "split_mode": 1,
    "main_gpu": 0,
    "progress_callback": 0,
    "kv_overrides": 0,
    "vocab_only": 0,
}
"""Fields of the default parameters and the values every tested build gives them."""
