void sf_call_with_result(uintptr_t function, void *result);
