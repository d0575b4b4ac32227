/* status.h - how the library fails: one macro writes the sentence and returns the status. */
#ifndef MOE_CORE_STATUS_H
#define MOE_CORE_STATUS_H

#include <moe/base.h>

/* Stores the sentence for this thread and returns `status`.  The format holds function, argument, wanted
   and got: "moe_layer_create: top_k 9 > experts 8". */
moe_status moe__fail(moe_status status, const char *format, ...) __attribute__((format(printf, 2, 3), cold));
/* Puts "prefix: " before the present sentence (a public function names itself in front of an inner error). */
moe_status moe__fail_in(moe_status status, const char *prefix);
void moe__clear_error(void);
/* Foreign text as it can stand in a sentence: on one line, its end where it is long. */
struct moe__shown {
  char text[96];
};
struct moe__shown moe__shown(const char *text);
/* MOE_ERR_IO: "fn: what PATH: the system's reason", of errno. */
moe_status moe__fail_io(const char *fn, const char *what, const char *path);
/* How many failures this thread has seen. */
uint64_t moe__failures(void);
/* What there is to say of a status that a function of the caller returned: the last error, where it is of this status and
   newer than so many failures; else moe_strerror. */
const char *moe__error_since(uint64_t failures, moe_status status);

#define MOE__TRY(call)                                                                                                 \
  do {                                                                                                                 \
    moe_status moe_st_ = (call);                                                                                       \
    if (moe_st_ != MOE_OK) return moe_st_;                                                                             \
  } while (0)

/* Growing structs: copies a caller's struct of its own size into the library's, zeroing what the caller
   does not know; MOE_ERR_VERSION where the caller sets what the library does not know, MOE_ERR_INVALID
   for NULL or a size that is no multiple of 8 or < 8. */
moe_status moe__struct_in(void *own, uint64_t own_size, const void *given, const char *function, const char *name);
/* Writes an output struct up to the smaller size; keeps given->size. */
moe_status moe__struct_out(void *given, const void *own, uint64_t own_size, const char *function, const char *name);

#endif
