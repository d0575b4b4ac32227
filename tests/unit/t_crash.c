/* t_crash.c - what is left of a checkpoint when a save does not get to its end: every call into the system and every
   allocation fails once in turn, is broken off by a signal, writes less than asked, or is the last that the process
   makes; disks are full; processes are killed at any time.  Always the old checkpoint or the new one is there, whole,
   and the next save works.

   The program is linked with --wrap for the calls that the library makes. */
#include "faults.h"
#include "files.h"

#include "core/checkpoint.h"
#include "fake.h"

#include <jansson.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

/* ---- generations ------------------------------------------------------------------------------------------------- */
/* A checkpoint of generation g: every value is g, and the metadata say so. */
enum { TENSORS = 5 };
static const int64_t extents[TENSORS] = { 1000, 3, 64, 7, 500 };

struct form {
  const char *name;
  uint64_t shard_bytes;
};
static const struct form forms[] = { { "g.safetensors", 0 }, { "g.safetensors.index.json", 2000 } };

static moe_status save_values(moe_checkpoint_writer *w, int32_t g)
{
  int32_t values[1000];
  char name[16], text[16];
  for (int i = 0; i < 1000; i++) values[i] = g;
  snprintf(text, sizeof text, "%d", (int)g);
  MOE__TRY(moe_checkpoint_writer_metadata(w, "generation", text));
  for (int i = 0; i < TENSORS; i++) {
    snprintf(name, sizeof name, "t%d", i);
    MOE__TRY(moe_checkpoint_writer_add(w, name, MOE_I32, 1, &extents[i], values));
  }
  return moe_checkpoint_writer_commit(w);
}

static moe_status save(const struct form *f, int32_t g)
{
  moe_checkpoint_writer_desc desc = moe_checkpoint_writer_desc_init();
  moe_checkpoint_writer *w;
  desc.shard_bytes = f->shard_bytes;
  MOE__TRY(moe_checkpoint_writer_create(&w, files_path(f->name), &desc));
  moe_status st = save_values(w, g);
  moe_checkpoint_writer_free(w);
  return st;
}

/* The generation that is there, whole. */
static int32_t generation(const struct form *f, const char *what, long n)
{
  moe_checkpoint *c;
  if (moe_checkpoint_open(&c, files_path(f->name)) || moe_checkpoint_verify(c, NULL))
    fail_msg("%s %s, %ld (%s): %s", f->name, what, n, hit ? hit : "-", moe_last_error());
  const char *text = moe_checkpoint_metadata(c, "generation");
  const int32_t g = text ? (int32_t)strtol(text, NULL, 10) : -1;
  if (moe_checkpoint_count(c) != TENSORS) fail_msg("%s %s, %ld: tensors are missing", f->name, what, n);
  for (int i = 0; i < TENSORS; i++) {
    moe_checkpoint_entry e = moe_checkpoint_entry_init();
    OK(moe_checkpoint_at(&e, c, i));
    for (int64_t k = 0; k < e.shape[0]; k++)
      if (memcmp((const char *)e.data + 4 * k, &g, 4) != 0)
        fail_msg("%s %s, %ld: a value of another generation", f->name, what, n);
  }
  moe_checkpoint_close(c);
  return g;
}

static int files_of(const struct form *f)
{
  return f->shard_bytes ? 4 : 1; /* the index and three shards */
}

/* ---- one fault in each place ------------------------------------------------------------------------------------- */
/* What may stay behind, or stay undone, where this call fails. */
static int is_tidying(const char *call)
{
  return call && (!strcmp(call, "unlink") || !strcmp(call, "opendir") || !strcmp(call, "open") ||
                  !strcmp(call, "flock") || !strcmp(call, "malloc"));
}

static void sweep_save(const struct form *f, enum fault what, const char *name, int must_succeed)
{
  OK(save(f, 1));
  const long live_before = host_live;
  const int open_before = descriptors();
  int32_t there = 1;
  for (long n = 1;; n++) {
    arm(what, n);
    moe_status st = save(f, there + 1);
    disarm();
    if (must_succeed && st) fail_msg("%s %s, %ld (%s): %s", f->name, name, n, hit, moe_last_error());
    const int32_t now = generation(f, name, n);
    const int in_place = st && strstr(moe_last_error(), "is in place");
    if (now != there + (!st || in_place))
      fail_msg("%s %s, %ld (%s): generation %d after %d (%s)", f->name, name, n, hit, now, there,
               st ? moe_last_error() : "no error");
    if (st == MOE_ERR_IO && !strstr(moe_last_error(), what == FULL ? "No space left on device" : "Input/output error"))
      fail_msg("%s %s, %ld (%s): no reason in \"%s\"", f->name, name, n, hit, moe_last_error());
    if (st && st != (what == MEMORY ? MOE_ERR_NO_MEMORY : MOE_ERR_IO))
      fail_msg("%s %s, %ld (%s): status %d, %s", f->name, name, n, hit, st, moe_last_error());
    if (!is_tidying(hit) && !in_place && files_count("", 0) != files_of(f))
      fail_msg("%s %s, %ld (%s): %d files are there", f->name, name, n, hit, files_count("", 0));
    if (host_live != live_before)
      fail_msg("%s %s, %ld (%s): %+ld allocations", f->name, name, n, hit, host_live - live_before);
    if (descriptors() != open_before) fail_msg("%s %s, %ld (%s): descriptors are left", f->name, name, n, hit);
    there = now;
    if (!hit) break;
    if (is_tidying(hit) || in_place) { /* the next save cleans up */
      OK(save(f, ++there));
      assert_int_equal(files_count("", 0), files_of(f));
    }
  }
  files_clear(NULL);
}

static void each_call_of_a_save_fails_once(void **state)
{
  (void)state;
  for (int i = 0; i < 2; i++) {
    sweep_save(&forms[i], FAIL, "I/O error", 0);
    sweep_save(&forms[i], FULL, "disk full", 0);
    sweep_save(&forms[i], MEMORY, "no memory", 0);
    sweep_save(&forms[i], INTERRUPT, "a signal", 1);
    sweep_save(&forms[i], SHORT, "less than asked", 1);
  }
}

static moe_status open_and_load(const struct form *f, moe_queue *q, moe_tensor *t)
{
  moe_checkpoint *c;
  char names[TENSORS][16];
  moe_checkpoint_item items[TENSORS];
  for (int i = 0; i < TENSORS; i++) {
    snprintf(names[i], sizeof names[i], "t%d", i);
    items[i] = (moe_checkpoint_item){ names[i], t[i] };
  }
  MOE__TRY(moe_checkpoint_open(&c, files_path(f->name)));
  moe_status st = moe_checkpoint_load(c, q, items, TENSORS, MOE_CHECKPOINT_VERIFY);
  moe_checkpoint_close(c);
  return st;
}

static void each_call_of_a_load_fails_once(void **state)
{
  static const enum fault faults[] = { FAIL, MEMORY, INTERRUPT };
  fake_reset();
  moe_context *ctx = fake_open();
  moe_queue *q;
  moe_tensor t[TENSORS];
  moe_span span;
  (void)state;
  OK(moe_queue_create(&q, ctx));
  for (int i = 0; i < TENSORS; i++) {
    const int64_t room = extents[i] * 2;
    OK(moe_span_alloc(&span, ctx, (uint64_t)room * 4));
    OK(moe_tensor_packed(&t[i], span, MOE_I32, 1, &room));
    OK(moe_tensor_every(&t[i], &t[i], 0, 0, 2));
  }
  for (int i = 0; i < 2; i++) {
    OK(save(&forms[i], 7));
    for (size_t k = 0; k < sizeof faults / sizeof faults[0]; k++) {
      const long live_before = host_live;
      const int open_before = descriptors();
      for (long n = 1;; n++) {
        arm(faults[k], n);
        fake_clear();
        parses = 1;
        moe_status st = open_and_load(&forms[i], q, t);
        parses = 0;
        disarm();
        if (!st != (!hit || faults[k] == INTERRUPT))
          fail_msg("%s, fault %zu at %ld (%s): %s", forms[i].name, k, n, hit, st ? moe_last_error() : "no error");
        if (st && st != (faults[k] == MEMORY ? MOE_ERR_NO_MEMORY : MOE_ERR_IO))
          fail_msg("%s, fault %zu at %ld (%s): status %d, %s", forms[i].name, k, n, hit, st, moe_last_error());
        if (st && faults[k] == FAIL && fake.writes) fail_msg("%s, %ld (%s): half loaded", forms[i].name, n, hit);
        if (host_live != live_before || descriptors() != open_before)
          fail_msg("%s, fault %zu at %ld (%s): %+ld allocations, %+d descriptors", forms[i].name, k, n, hit,
                   host_live - live_before, descriptors() - open_before);
        if (!hit) break;
      }
    }
  }
  for (int i = 0; i < TENSORS; i++) {
    span.handle = t[i].handle;
    moe_span_free(ctx, &span);
  }
  moe_queue_free(q);
  moe_context_free(ctx);
}

/* Nothing gets its name before it is durable, and the index gets its own after the names of the shards are. */
static void the_order_of_sync_and_rename(void **state)
{
  static const char *const ends[] = { "WSRS", "SRRRSWSRS" };
  (void)state;
  for (int i = 0; i < 2; i++)
    for (int again = 0; again < 2; again++) {
      arm(NONE, 0);
      OK(save(&forms[i], 1));
      disarm();
      const size_t length = strlen(trace), end = strlen(ends[i]);
      if (length < end || strcmp(trace + length - end, ends[i]) != 0) fail_msg("%s: %s", forms[i].name, trace);
      int syncs = 0;
      for (const char *c = trace; *c; c++) syncs += *c == 'S';
      assert_int_equal(syncs, i ? 3 + 1 + 1 + 1 : 2); /* shards, folder, index, folder */
    }
}

/* Where the old checkpoint has the same content its shards have the same names: they must stay. */
static void a_failed_save_of_the_same_content(void **state)
{
  (void)state;
  for (int i = 0; i < 2; i++) {
    OK(save(&forms[i], 1));
    for (long n = 1;; n++) {
      arm(FAIL, n);
      moe_status st = save(&forms[i], 1);
      disarm();
      assert_int_equal(generation(&forms[i], "the same", n), 1);
      if (!hit) break;
      if (st && !is_tidying(hit)) assert_int_equal(files_count(".tmp", 0), 0);
    }
    assert_int_equal(files_count("", 0), files_of(&forms[i]));
    files_clear(NULL);
  }
}

/* And where it is not known whether a name is there, it may be one of the old checkpoint's. */
static void a_save_of_the_same_content_that_fails_twice(void **state)
{
  const struct form *f = &forms[1];
  (void)state;
  OK(save(f, 1));
  for (long n = 1;; n++) {
    arm(FAIL, n);
    (void)!save(f, 1);
    disarm();
    if (!hit) break;
    if (strcmp(hit, "lstat") != 0) continue;
    for (long m = n + 1; hit; m++) {
      arm(FAIL, m);
      fault_too = n;
      (void)!save(f, 1);
      disarm();
      assert_int_equal(generation(f, "the same", m), 1);
      if (calls < m) break;
    }
  }
}

/* ---- B35: saving destroys the previous checkpoint ---------------------------------------------------------------- */
static void a_full_disk_leaves_the_old_checkpoint(void **state)
{
  struct rlimit was, small = { 1000, 0 };
  (void)state;
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
  small.rlim_max = was.rlim_max;
  signal(SIGXFSZ, SIG_IGN);
  for (int i = 0; i < 2; i++) {
    OK(save(&forms[i], 1));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    moe_status st = save(&forms[i], 2);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_int_equal(st, MOE_ERR_IO);
    assert_non_null(strstr(moe_last_error(), "File too large"));
    assert_int_equal(generation(&forms[i], "full", 0), 1);
    assert_int_equal(files_count("", 0), files_of(&forms[i]));
    OK(save(&forms[i], 3));
    assert_int_equal(generation(&forms[i], "full", 1), 3);
    files_clear(NULL);
  }
  signal(SIGXFSZ, SIG_DFL);
}

/* What is saved are the mapped data of the file that it replaces. */
static void a_save_onto_the_mapped_file(void **state)
{
  (void)state;
  for (int i = 0; i < 2; i++) {
    const struct form *f = &forms[i];
    moe_checkpoint_writer_desc desc = moe_checkpoint_writer_desc_init();
    moe_checkpoint_writer *w;
    moe_checkpoint *c;
    moe_checkpoint_entry e = moe_checkpoint_entry_init();
    desc.shard_bytes = f->shard_bytes;
    OK(save(f, 5));
    OK(moe_checkpoint_open(&c, files_path(f->name)));
    for (int twice = 0; twice < 2; twice++) {
      OK(moe_checkpoint_writer_create(&w, files_path(f->name), &desc));
      OK(moe_checkpoint_writer_metadata(w, "generation", "5"));
      for (int k = TENSORS - 1; k >= 0; k--) {
        OK(moe_checkpoint_at(&e, c, k));
        OK(moe_checkpoint_writer_add(w, e.name, e.dtype, e.rank, e.shape, e.data));
      }
      OK(moe_checkpoint_writer_commit(w));
      moe_checkpoint_writer_free(w);
      OK(moe_checkpoint_verify(c, NULL));
      assert_int_equal(generation(f, "mapped", twice), 5);
    }
    moe_checkpoint_close(c);
    files_clear(NULL);
  }
}

static void a_writer_that_is_freed_leaves_nothing(void **state)
{
  static const char data[1999];
  (void)state;
  for (int i = 0; i < 2; i++) {
    moe_checkpoint_writer_desc desc = moe_checkpoint_writer_desc_init();
    moe_checkpoint_writer *w;
    desc.shard_bytes = forms[i].shard_bytes;
    OK(moe_checkpoint_writer_create(&w, files_path(forms[i].name), &desc));
    for (int k = 0; k < 3; k++)
      OK(moe_checkpoint_writer_add(w,
                                   k == 0   ? "a"
                                   : k == 1 ? "b"
                                            : "c",
                                   MOE_U8, 1, (const int64_t[]){ sizeof data }, data));
    assert_int_equal(files_count(".safetensors", 0), 0);
    assert_int_equal(files_count(".json", 0), 0);
    assert_true(files_count(".tmp", 0) > 0);
    moe_checkpoint_writer_free(w);
    assert_int_equal(files_count("", 0), 0);
  }
}

/* Files get the mode that the process gives to new files. */
static void modes_are_those_of_new_files(void **state)
{
  struct stat is;
  (void)state;
  const mode_t was = umask(027);
  OK(save(&forms[0], 1));
  umask(was);
  assert_int_equal(stat(files_path(forms[0].name), &is), 0);
  assert_int_equal(is.st_mode & 0777, 0640);
}

/* ---- killed ------------------------------------------------------------------------------------------------------ */
static void wait_for(pid_t child)
{
  int status;
  while (waitpid(child, &status, 0) < 0) assert_int_equal(errno, EINTR);
}

/* Before and after each call into the system. */
static void killed_at_each_call(void **state)
{
  static const enum fault faults[] = { KILL_BEFORE, KILL_AFTER };
  (void)state;
  for (int i = 0; i < 2; i++)
    for (int k = 0; k < 2; k++) {
      const struct form *f = &forms[i];
      int32_t there = 1;
      OK(save(f, there));
      for (long n = 1;; n++) {
        const pid_t child = fork();
        int status;
        if (!child) {
          arm(faults[k], n);
          _exit(save(f, there + 1) != MOE_OK);
        }
        assert_true(child > 0);
        assert_int_equal(waitpid(child, &status, 0), child);
        const int32_t now = generation(f, "killed", n);
        if (now != there && now != there + 1)
          fail_msg("%s, killed at %ld: generation %d after %d", f->name, n, now, there);
        there = now;
        if (!WIFSIGNALED(status)) {
          assert_int_equal(WEXITSTATUS(status), 0);
          break;
        }
        if (n % 3) continue; /* remains pile up, and one save takes them all away */
        OK(save(f, ++there));
        if (files_count("", 0) != files_of(f)) fail_msg("%s, killed at %ld: %d files", f->name, n, files_count("", 0));
      }
      files_clear(NULL);
    }
}

static void killed_at_any_time(void **state)
{
  const int times = test_short() ? 30 : test_long() ? 1000 : 120;
  uint32_t random = 12345;
  (void)state;
  for (int i = 0; i < 2; i++) {
    const struct form *f = &forms[i];
    int32_t there = 1;
    OK(save(f, there));
    for (int n = 0; n < times; n++) {
      const pid_t child = fork();
      if (!child)
        for (int32_t g = there + 1;; g++)
          if (save(f, g)) _exit(1);
      assert_true(child > 0);
      random = random * 1664525u + 1013904223u;
      const struct timespec pause = { 0, (long)(random >> 8) % 20000000 };
      nanosleep(&pause, NULL);
      assert_int_equal(kill(child, SIGKILL), 0);
      wait_for(child);
      const int32_t now = generation(f, "killed", n);
      if (now < there) fail_msg("%s, kill %d: generation %d after %d", f->name, n, now, there);
      there = now;
    }
    OK(save(f, ++there));
    assert_int_equal(files_count("", 0), files_of(f));
    files_clear(NULL);
  }
}

/* A reader may open while another process saves: shards that go away under it are looked for again. */
static void opened_while_it_is_saved(void **state)
{
  const int times = test_short() ? 100 : 500;
  (void)state;
  for (int i = 0; i < 2; i++) {
    const struct form *f = &forms[i];
    int32_t there = 1;
    OK(save(f, there));
    const pid_t child = fork();
    if (!child)
      for (int32_t g = 2;; g++)
        if (save(f, g)) _exit(1);
    assert_true(child > 0);
    for (int n = 0; n < times; n++) {
      const int32_t now = generation(f, "while saving", n);
      assert_true(now >= there);
      there = now;
    }
    assert_int_equal(kill(child, SIGKILL), 0);
    wait_for(child);
    OK(save(f, 0));
    files_clear(NULL);
  }
}

/* ---- two writers ------------------------------------------------------------------------------------------------- */
static void one_writer_at_a_time(void **state)
{
  (void)state;
  for (int i = 0; i < 2; i++) {
    const struct form *f = &forms[i];
    moe_checkpoint_writer_desc desc = moe_checkpoint_writer_desc_init();
    moe_checkpoint_writer *w;
    desc.shard_bytes = f->shard_bytes;
    OK(moe_checkpoint_writer_create(&w, files_path(f->name), &desc));
    FAILS(MOE_ERR_STATE, "another writer is at work on ", save(f, 1));
    const pid_t child = fork(); /* in another process too */
    if (!child) _exit(save(f, 1) == MOE_ERR_STATE ? 0 : 1);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    OK(save_values(w, 2)); /* the first has lost nothing by it */
    moe_checkpoint_writer_free(w);
    assert_int_equal(generation(f, "two writers", 0), 2);
    assert_int_equal(files_count("", 0), files_of(f));
    files_clear(NULL);
  }
}

/* Files of other names, and of names that only look alike, stay. */
static void other_files_stay(void **state)
{
  static const char *const names[] = {
    "g-00001-of-00002.safetensors",
    "g-0123456789abcdef-0001-of-00002.safetensors",
    "g-0123456789abcdeg-00001-of-00002.safetensors",
    "h-0123456789abcdef-00001-of-00002.safetensors",
    "g-0123456789abcdef-00001-of-00002.safetensors.bak",
    "gg-0123456789abcdef-00001-of-00002.safetensors",
    ".g.safetensors.0123456789abcdef.tmp.x",
    ".g.safetensors.0123456789abcde.tmp",
    ".h.safetensors.0123456789abcdef.tmp",
  };
  static const char *const remains[] = { "g-0123456789abcdef-00001-of-100000.safetensors",
                                         ".g.safetensors.index.json.0123456789abcdef.tmp" };
  const int n = (int)(sizeof names / sizeof names[0]);
  (void)state;
  for (int i = 0; i < n; i++) files_write(files_path(names[i]), "x", 1);
  for (int i = 0; i < 2; i++) files_write(files_path(remains[i]), "x", 1);
  OK(save(&forms[0], 1));
  OK(save(&forms[1], 1));
  for (int i = 0; i < n; i++)
    if (access(files_path(names[i]), F_OK)) fail_msg("%s is gone", names[i]);
  for (int i = 0; i < 2; i++)
    if (!access(files_path(remains[i]), F_OK)) fail_msg("%s is there", remains[i]);
  assert_int_equal(files_count("", 0), n + files_of(&forms[0]) + files_of(&forms[1]));
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, NULL, files_clear)
  const struct CMUnitTest tests[] = {
    T(each_call_of_a_save_fails_once),
    T(each_call_of_a_load_fails_once),
    T(the_order_of_sync_and_rename),
    T(a_failed_save_of_the_same_content),
    T(a_save_of_the_same_content_that_fails_twice),
    T(a_full_disk_leaves_the_old_checkpoint),
    T(a_save_onto_the_mapped_file),
    T(a_writer_that_is_freed_leaves_nothing),
    T(modes_are_those_of_new_files),
    T(killed_at_each_call),
    T(killed_at_any_time),
    T(opened_while_it_is_saved),
    T(one_writer_at_a_time),
    T(other_files_stay),
  };
  json_set_alloc_funcs(json_memory, __wrap_free);
  return cmocka_run_group_tests(tests, files_open, files_close) ? 1 : 0;
}
