/* walk.c - see walk.h. */
#include "core/walk.h"

#include <stdio.h>

void moe__walk_line(struct moe__walk *w, const char *label, const char *id, const char *reason)
{
  uint64_t room = w->used < w->room ? w->room - w->used : 0;
  int n = snprintf(room ? w->text + w->used : NULL, room, "%s: %s%s%s%s\n", label, id, reason[0] ? " (" : "", reason,
                   reason[0] ? ")" : "");
  if (n > 0) w->used += (uint64_t)n;
}

void *moe__placeholder(void)
{
  static _Alignas(256) char place[256];
  return place;
}
