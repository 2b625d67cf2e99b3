/* probe_gpus.c - for the configure step: prints the compute capability of every GPU that the NVIDIA
 * driver shows, as in "90 90 120", and nothing where there is no driver or no GPU.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <stdio.h>

enum { SM_MAJOR = 75, SM_MINOR = 76 }; /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_... */

static void *library;
static void *find(const char *name) {
    return library == NULL ? NULL : dlsym(library, name);
}

int main(void) {
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(unsigned), (*count)(int *), (*attribute)(int *, int, int);
    *(void **)&init = find("cuInit");
    *(void **)&count = find("cuDeviceGetCount");
    *(void **)&attribute = find("cuDeviceGetAttribute");
    int num_gpus = 0, major = 0, minor = 0;
    if (!init || !count || !attribute || init(0) != 0 || count(&num_gpus) != 0) return 0;
    for (int i = 0; i < num_gpus; i++) {
        if (attribute(&major, SM_MAJOR, i) == 0 && attribute(&minor, SM_MINOR, i) == 0)
            printf("%d ", 10 * major + minor);
    }
    return 0;
}
