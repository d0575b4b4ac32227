/* emulator.cpp - see emulator.h. */
#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

namespace emulator
{

enum { STACK_BYTES = 128 << 10, PAGE = 4096 };

thread *now;
const grid *running;
static const uint64_t seed = getenv("MOE_EMULATOR_SEED") ? strtoull(getenv("MOE_EMULATOR_SEED"), NULL, 0) : 1;
static long launches;
static uint64_t state;
static unsigned yields, lands,
    stalls; /* of 256: at a place to yield; of what is under way, in a round; of ready lanes */
static void *scheduler;
static std::vector<std::function<void()>> under_way;
static std::vector<block *> live, free_blocks;

/* ---- fibres ------------------------------------------------------------------------------------------------------ */
extern "C" void moe_emulator_switch(void **save, void *to);
__asm__(".text\n"
        ".globl moe_emulator_switch\n"
        "moe_emulator_switch:\n"
        "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
        "  mov %rsp, (%rdi)\n"
        "  mov %rsi, %rsp\n"
        "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n"
        "  ret\n");

static void yield()
{
  moe_emulator_switch(&now->stack_pointer, scheduler);
}

static void whole_life()
{
  running->kernel(running->function, running->argument);
  if (!now->copies.empty()) die("a thread ends with copies in no group");
  for (const auto &group : now->groups)
    if (!group.empty()) die("a thread ends with copies under way");
  now->groups.clear();
  now->done = true;
  now->block->alive--;
  yield();
  abort();
}

/* Six registers and where to return to, at an address that a function's frame wants. */
static void prepare(thread *t)
{
  if (!t->stack) {
    t->stack = (unsigned char *)mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (t->stack == MAP_FAILED || mprotect(t->stack, PAGE, PROT_NONE)) die("no memory for stacks");
  }
  void **top = (void **)(t->stack + STACK_BYTES - 64);
  *--top = NULL;
  *--top = (void *)whole_life;
  for (int i = 0; i < 6; i++) *--top = NULL;
  t->stack_pointer = top;
  t->done = false;
  t->waits_for = NULL;
  t->arrivals = 0;
  t->stores.clear();
  t->store.reset();
}

void maybe_yield()
{
  if (by_chance(yields)) yield();
}

void wait(const char *what, bool (*over)(const thread &), const void *on, unsigned long value)
{
  now->waits_for = what, now->over = over, now->on = on, now->value = value;
  while (!over(*now)) yield();
  now->waits_for = NULL;
}

void later(std::function<void()> what)
{
  under_way.push_back(std::move(what));
}

/* ---- chance and faults ------------------------------------------------------------------------------------------- */
uint32_t random_bits()
{
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(state >> 24);
}

bool by_chance(unsigned times)
{
  return random_bits() % 256 < times;
}

void die(const char *format, ...)
{
  va_list list;
  va_start(list, format);
  fflush(stdout);
  fprintf(stderr, "emulator: %s, launch %ld of seed %llu", running ? running->name : "", launches,
          (unsigned long long)seed);
  if (now) fprintf(stderr, ", block %d, thread %d", now->block->number, now->number);
  fprintf(stderr, ": ");
  vfprintf(stderr, format, list);
  fprintf(stderr, "\n");
  va_end(list);
  abort();
}

static void say_waits(const block *b)
{
  for (int first = 0; first < b->threads;) {
    const thread &t = b->thread_at[first];
    int end = first + 1;
    for (; end < b->threads; end++) {
      const thread &u = b->thread_at[end];
      if (u.done != t.done || u.waits_for != t.waits_for || u.on != t.on || u.value != t.value) break;
    }
    fprintf(stderr, "  block %d, threads %d to %d: ", b->number, first, end - 1);
    if (t.done) fprintf(stderr, "ended");
    else fprintf(stderr, "wait for a %s", t.waits_for ? t.waits_for : "turn");
    if (!t.done)
      for (const auto &at : b->mbarriers)
        if (&at.second == t.on)
          fprintf(stderr, " at %u, parity %lu: phase %u, %d of %d arrivals and %d bytes missing",
                  (unsigned)(at.first - SHARED_BASE), t.value, at.second.phase, at.second.pending, at.second.expected,
                  at.second.bytes);
    fprintf(stderr, "\n");
    first = end;
  }
}

/* ---- the grid ---------------------------------------------------------------------------------------------------- */
static block *new_block(int number)
{
  block *b;
  if (free_blocks.empty()) {
    b = new block();
    b->shared = (unsigned char *)aligned_alloc(1024, SHARED_BYTES);
    if (!b->shared) die("no memory for blocks");
  } else {
    b = free_blocks.back();
    free_blocks.pop_back();
  }
  const int threads = running->threads;
  memset(b->shared, 0xff, SHARED_BYTES);
  if ((int)b->thread_at.size() < threads) b->thread_at.resize((size_t)threads);
  b->number = number, b->rank = number % running->cluster, b->threads = b->alive = threads;
  b->mbarriers.clear();
  b->all = b->whole_cluster = meeting();
  for (meeting &m : b->named) m = meeting();
  for (meeting &m : b->warps) m = meeting();
  for (int i = 0; i < threads; i++) {
    b->thread_at[(size_t)i].block = b;
    b->thread_at[(size_t)i].number = i;
    prepare(&b->thread_at[(size_t)i]);
  }
  live.push_back(b);
  return b;
}

/* Some steps of a warp; whether any lane could go on. */
static bool step(thread *warp, unsigned slow)
{
  bool could = false;
  const bool skipped = by_chance(slow);
  for (int turns = 1 + (int)(random_bits() % 16); turns > 0; turns--) {
    bool ran = false;
    for (int i = 0; i < WARP; i++) {
      thread *t = warp + i;
      if (t->done || (t->waits_for && !t->over(*t))) continue;
      could = true;
      if (skipped) return true;
      if (by_chance(stalls)) continue;
      now = t;
      moe_emulator_switch(&scheduler, t->stack_pointer);
      now = NULL;
      ran = true;
    }
    if (!ran) break;
  }
  return could;
}

static bool land()
{
  if (under_way.empty()) return false;
  std::vector<std::function<void()>> before;
  before.swap(under_way);
  for (size_t i = before.size(); i > 1; i--) std::swap(before[i - 1], before[random_bits() % i]);
  for (auto &f : before)
    if (by_chance(lands)) f();
    else under_way.push_back(std::move(f));
  return true;
}

/* Blocks whose cluster has ended. */
static void retire()
{
  for (size_t i = 0; i < live.size();) {
    int alive = 0;
    for (int r = 0; r < running->cluster; r++) alive += live[i + (size_t)r]->alive;
    if (alive) i += (size_t)running->cluster;
    else {
      for (int r = 0; r < running->cluster; r++) {
        for (const auto &at : live[i]->mbarriers)
          if (at.second.bytes) die("block %d ends with bytes to come", live[i]->number);
        free_blocks.push_back(live[i]);
        live.erase(live.begin() + (long)i);
      }
    }
  }
}

void run(const grid &g)
{
  unsigned slow[64];
  int next = 0;
  running = &g;
  if (g.shared > SHARED_BYTES || g.threads % WARP || g.blocks % g.cluster) die("a grid of another kind");
  state = (seed << 32 ^ (uint64_t)++launches) * 0x9e3779b97f4a7c15u | 1;
  for (int i = 0; i < 8; i++) random_bits();
  yields = by_chance(170) ? random_bits() % 8 : 64;
  lands = by_chance(170) ? 20 + random_bits() % 236 : 4;
  stalls = by_chance(192) ? 0 : 128;
  for (unsigned &s : slow) s = by_chance(192) ? 0 : by_chance(128) ? 200 : 250;
  const int resident = g.resident ? g.resident : 1 + (int)(random_bits() % (unsigned)g.blocks);
  while (next < g.blocks || !live.empty()) {
    while (next < g.blocks && (int)live.size() + g.cluster <= std::max(resident, g.cluster)) {
      block *cluster[MOST_IN_CLUSTER];
      for (int r = 0; r < g.cluster; r++) cluster[r] = new_block(next++);
      for (int r = 0; r < g.cluster; r++) std::copy(cluster, cluster + g.cluster, cluster[r]->cluster);
    }
    bool could = false;
    for (block *b : live) {
      const int warps = b->threads / WARP, start = (int)(random_bits() % (unsigned)warps);
      for (int i = 0; i < warps; i++) {
        const int w = (start + i) % warps;
        could |= step(&b->thread_at[(size_t)(w * WARP)], slow[(b->number * warps + w) % 64]);
      }
    }
    could |= land();
    bool ended = true;
    for (const block *b : live) ended &= b->alive == 0;
    if (!could && !ended) {
      fflush(stdout);
      for (const block *b : live) say_waits(b);
      die("nobody can go on");
    }
    if (under_way.empty()) retire(); /* what is under way may go to their memory */
  }
  running = NULL;
}

/* ---- shared memory ----------------------------------------------------------------------------------------------- */
unsigned char *shared_at(block *b, uint32_t address, int bytes, int aligned)
{
  if (b->alive == 0) die("block %d is accessed, which has ended", b->number);
  if (address % (uint32_t)aligned) die("shared address %u, wanted a multiple of %d", address, aligned);
  if (address < SHARED_BASE || address + (uint32_t)bytes > SHARED_BASE + (uint32_t)running->shared)
    die("shared address %u, of %d bytes", address - SHARED_BASE, running->shared);
  return b->shared + (address - SHARED_BASE);
}

uint32_t shared_address(const void *p)
{
  return (uint32_t)((const unsigned char *)p - now->block->shared) + SHARED_BASE;
}

void copy_begin(uint32_t to, const void *from, int bytes)
{
  copy c = { to, { 0 } };
  if ((uintptr_t)from % 16) die("cp.async from %p", from);
  memcpy(c.data, from, (size_t)bytes);
  memset(shared_at(now->block, to, 16, 16), 0xff, 16);
  now->copies.push_back(c);
}

static void land_copies(block *b, const std::vector<copy> &copies)
{
  for (const copy &c : copies) memcpy(shared_at(b, c.to, 16, 16), c.data, 16);
}

void copy_commit()
{
  now->groups.push_back(std::move(now->copies));
  now->copies.clear();
}

void copy_wait(int left)
{
  while ((int)now->groups.size() > left) {
    land_copies(now->block, now->groups.front());
    now->groups.pop_front();
  }
}

void copy_arrive(uint32_t bar)
{
  block *b = now->block;
  std::vector<copy> copies = std::move(now->copies);
  now->copies.clear();
  later([b, bar, copies] {
    land_copies(b, copies);
    barrier_arrive(b, bar, 1, 0);
  });
}

mbarrier *barrier_at(block *b, uint32_t bar)
{
  const auto at = b->mbarriers.find(bar);
  if (b->alive == 0) die("block %d is arrived at, which has ended", b->number);
  if (at == b->mbarriers.end()) die("there is no mbarrier at %u", bar - SHARED_BASE);
  return &at->second;
}

void barrier_arrive(block *b, uint32_t bar, int arrivals, int bytes)
{
  mbarrier *m = barrier_at(b, bar);
  if (m->pending < arrivals)
    die("mbarrier at %u: more arrivals than the %d of a phase", bar - SHARED_BASE, m->expected);
  m->pending -= arrivals;
  m->bytes -= bytes;
  if (m->pending == 0 && m->bytes < 0) die("mbarrier at %u: more bytes than announced", bar - SHARED_BASE);
  if (m->pending == 0 && m->bytes == 0) m->pending = m->expected, m->phase++;
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */
/* Round to nearest even, with the processor's own additions: the sum's last bit is that of the half. */
uint16_t to_half(float f)
{
  const uint32_t sign = to_bits(f) >> 16 & 0x8000u, u = to_bits(f) & 0x7fffffffu;
  if (u > 0x7f800000u) return (uint16_t)(0x7fffu);
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (u < 0x38800000u) return (uint16_t)(sign | (to_bits(from_bits(u) + 0.5f) - to_bits(0.5f)));
  return (uint16_t)(sign | ((u + 0xfffu + (u >> 13 & 1) - (112u << 23)) >> 13));
}

uint16_t to_bf16(float f)
{
  const uint32_t u = to_bits(f);
  return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

float from_half(uint16_t h)
{
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31, bits = h & 0x3ffu;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | bits << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | bits << 13);
  return from_bits(sign | to_bits((float)bits * 0x1p-24f));
}

} // namespace emulator
