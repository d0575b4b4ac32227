/* walk.h - one description of an object's steps, walked four ways: to prepare every kernel (create), to
   say which implementation each step gets (explain), to refuse tensors that a demanded kind of kernel cannot
   take (before anything runs), and to run.  So they cannot disagree. */
#ifndef MOE_CORE_WALK_H
#define MOE_CORE_WALK_H

#include "core/backend.h"

#include <moe/experts.h>

struct moe__walk {
  enum { MOE__PREPARE, MOE__EXPLAIN, MOE__CHECK, MOE__RUN } mode;
  moe_context *ctx;
  moe_queue *q; /* RUN */
  char *text;   /* EXPLAIN: where lines go, `room` bytes; `used` counts all, written or not */
  uint64_t room, used;
};

/* "label: id" and, where given, " (reason)". */
void moe__walk_line(struct moe__walk *w, const char *label, const char *id, const char *reason);

/* A handle for tensors of a walk that does not run: never read, aligned. */
void *moe__placeholder(void);

#define STEP(w, label, op, strategy, ...)                                                                              \
  do {                                                                                                                 \
    const struct moe__args_##op args_ = { __VA_ARGS__ };                                                               \
    if ((w)->mode == MOE__RUN) {                                                                                       \
      MOE__TRY(moe__run_##op((w)->q, &args_, strategy));                                                               \
      if ((w)->q->on_step) (w)->q->on_step((w)->q->on_step_user, label);                                               \
    } else if ((w)->mode == MOE__PREPARE) MOE__TRY(moe__prepare_##op((w)->ctx, &args_, strategy));                     \
    else {                                                                                                             \
      struct moe__why why_ = { "" };                                                                                   \
      const struct moe__impl_##op *impl_ = moe__pick_##op((w)->ctx, &args_, strategy, &why_);                          \
      if ((w)->mode == MOE__EXPLAIN) moe__walk_line(w, label, impl_ ? impl_->id : "none", why_.text);                  \
      else if (!impl_) return moe__fail(MOE_ERR_INVALID, "%s: %s", label, why_.text);                                  \
    }                                                                                                                  \
  } while (0)

/* A step that stands for the ones behind it where an implementation serves it, which `served` says.  Those are
   prepared as well: what they are given when they run decides. */
#define STEP_IF(w, served, label, op, strategy, ...)                                                                   \
  do {                                                                                                                 \
    const struct moe__args_##op whole_ = { __VA_ARGS__ };                                                              \
    served = moe__pick_##op((w)->ctx, &whole_, strategy, NULL) != NULL;                                                \
    if (served && (w)->mode == MOE__PREPARE) MOE__TRY(moe__prepare_##op((w)->ctx, &whole_, strategy));                 \
    else if (served) STEP(w, label, op, strategy, __VA_ARGS__);                                                        \
    served &= (w)->mode != MOE__PREPARE;                                                                               \
  } while (0)

#endif
