# Toolchain file: cross-builds for arm64 on Debian, tests run under qemu-user.
#   scripts/make_arm64_sysroot build/sysroot-arm64
#   cmake -S . -B build-arm64 -G Ninja --toolchain cmake/arm64.cmake
# KV8_SYSROOT names another place for the sysroot.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
if(NOT KV8_SYSROOT)
  set(KV8_SYSROOT ${CMAKE_CURRENT_LIST_DIR}/../build/sysroot-arm64)
endif()
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KV8_SYSROOT)
get_filename_component(sysroot ${KV8_SYSROOT}/root ABSOLUTE)
set(libraries ${sysroot}/usr/lib/aarch64-linux-gnu)

set(CMAKE_FIND_ROOT_PATH ${sysroot} /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${libraries}/pkgconfig)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${sysroot})

set(CMAKE_C_FLAGS_INIT "-isystem ${sysroot}/usr/include")
set(CMAKE_EXE_LINKER_FLAGS_INIT "-Wl,-rpath-link,${libraries}")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-L${libraries}")
# "max" has every extension that qemu knows, BF16 among them.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -cpu max -L /usr/aarch64-linux-gnu
  -E LD_LIBRARY_PATH=${libraries})
