/* moe-info - lists the backends and devices that libmoe can use here, what each can do, and what is
   missing and how to get it.  Uses the public interface only. */
#include <moe/context.h>

#include <stdio.h>

static const char *const backends[] = { "cuda", "opencl" };

static const char usage[] = "Usage: moe-info [--help | --version]\n"
                            "Lists libmoe's backends and devices, what each can do, and what is missing.\n"
                            "The name at the head of a device (cuda:0, opencl:0:0) is what --device of the other\n"
                            "programs and moe_context_desc.device take.\n";

static void print_size(int64_t bytes)
{
  static const char *const units[] = { "bytes", "KiB", "MiB", "GiB", "TiB" };
  double value = (double)bytes;
  size_t unit = 0;
  for (; value >= 1024 && unit < sizeof units / sizeof units[0] - 1; unit++) value /= 1024;
  printf("%.*f %s", value < 10 && value != (double)(int)value ? 1 : 0, value, units[unit]);
}

static const char *kind_name(int64_t kind)
{
  return kind == MOE_DEVICE_GPU ? "GPU" : kind == MOE_DEVICE_CPU ? "CPU" : "other";
}

/* Opens the device: that it is listed does not say that it works. */
static void print_device(const moe_device_info *info)
{
  moe_context_desc desc = moe_context_desc_init();
  moe_context *ctx;
  desc.device = info->id;
  printf("\n%s  %s\n", info->id, info->name);
  printf("  kind      %s, %lld compute units", kind_name(info->kind), (long long)info->compute_units);
  if (info->arch) printf(", compute capability %lld.%lld", (long long)info->arch / 10, (long long)info->arch % 10);
  printf("\n  driver    %s\n  memory    ", info->driver);
  print_size(info->memory);
  printf(", at most ");
  print_size(info->max_alloc);
  printf(" in one allocation; local ");
  print_size(info->local_memory);
  printf("\n  types     %sf32 bf16 f16%s\n", info->fp64 ? "f64 " : "", info->fp64 ? "" : " (no double precision)");
  printf("  kernels   portable%s%s\n", info->tensor ? ", matrix units" : "",
         info->kind == MOE_DEVICE_CPU ? ", tuned for CPUs" : "");
  if (moe_context_create(&ctx, &desc) == MOE_OK) printf("  status    ready\n");
  else printf("  status    does not open: %s\n", moe_last_error());
  moe_context_free(ctx);
}

static void print_default(void)
{
  moe_device_info info = moe_device_info_init();
  moe_context *ctx;
  if (moe_context_create(&ctx, NULL) == MOE_OK && moe_context_info(ctx, &info) == MOE_OK)
    printf("\nDefault device: %s\n", info.id);
  else printf("\nNo device: training and inference need one of the above.\n");
  moe_context_free(ctx);
}

int main(int argc, char **argv)
{
  moe_device_info info = moe_device_info_init();
  if (argc > 1 && strcmp(argv[1], "--help") == 0) {
    fputs(usage, stdout);
    return 0;
  }
  if (argc > 1 && strcmp(argv[1], "--version") == 0) {
    printf("moe-info (libmoe) %s\n", moe_version_string());
    return 0;
  }
  if (argc > 1) {
    fprintf(stderr, "moe-info: unknown argument: %s\n%s", argv[1], usage);
    return 2;
  }
  printf("libmoe %s\n", moe_version_string());
  for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++) {
    const char *reason = moe_backend_reason(backends[i]);
    printf("%-8s  %s%s\n", backends[i], *reason ? "no device: " : "available", reason);
  }
  for (int64_t i = 0; moe_device_list(&info, i) == MOE_OK; i++) print_device(&info);
  print_default();
  return 0;
}
