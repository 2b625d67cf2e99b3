/* old_driver.c - a libcuda.so.1 from before kv8's time: it starts, and lacks most of what is asked.
 *
 * SPDX-License-Identifier: Apache-2.0 */
int cuInit(unsigned flags);
int cuGetErrorName(int result, const char **out);

int cuInit(unsigned flags) {
    return flags == 0 ? 0 : 1;
}
int cuGetErrorName(int result, const char **out) {
    (void)result;
    *out = 0;
    return 1;
}
