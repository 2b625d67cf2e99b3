#!/bin/sh
# check_archs.sh DRIVER_DIRECTORY - what KV8_CUDA_ARCHS and KV8_CUDA make of a machine: configures kv8
# with a compiler that only says what nvcc says and a driver that is the stand-in (one GPU of compute
# capability 9.0), or none, and reads the one line about CUDA kernels.
#
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")/../.."
driver=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/nvcc" <<'NVCC'
#!/bin/sh
case "$*" in
    --version) echo "Cuda compilation tools, release 12.4, V12.4.1" ;;
    --list-gpu-code) echo sm_75 sm_80 sm_86 sm_90 ;;
esac
NVCC
chmod +x "$work/nvcc"
bad=0

# expect LINE [cmake options]: the whole line behind "-- CUDA kernels: ", or a part of the refusal.
expect() {
    line=$1
    shift
    rm -rf "$work/build"
    said=$(cmake -S . -B "$work/build" -G Ninja -DKV8_TESTS=OFF -DKV8_NVCC="$work/nvcc" "$@" 2>&1 |
        tr '\n' ' ' | tr -s ' ')
    case $said in
        *"-- CUDA kernels: $line -- "* | *"CMake Error"*"$line"*) ;;
        *)  echo "KV8_CUDA_ARCHS: $*: must say \"$line\", says: $said" >&2; bad=1 ;;
    esac
}
unknown='not sm_100 sm_120, which nvcc 12.4 does not know'
others='configure with -DKV8_CUDA_ARCHS=all)'
export LD_LIBRARY_PATH="$driver"
expect "sm_90 sm_90a (GPUs here: 90, for others $others"
expect "sm_80 sm_90 sm_90a, $unknown" -DKV8_CUDA_ARCHS=all
expect "sm_90 sm_90a (for other GPUs $others" -DKV8_CUDA_ARCHS=90a
expect "sm_80 sm_90 sm_90a (for other GPUs $others" '-DKV8_CUDA_ARCHS=90;86'
expect "none: KV8_CUDA_ARCHS asked for 75 (for other GPUs $others" -DKV8_CUDA_ARCHS=75
expect 'KV8_CUDA_ARCHS: "sm_90" is not native, all, or a list' -DKV8_CUDA_ARCHS=sm_90
expect 'none: built with KV8_CUDA=OFF' -DKV8_CUDA=OFF
expect 'KV8_CUDA=ON: no CUDA kernels: /bin/false does not work' -DKV8_CUDA=ON -DKV8_NVCC=/bin/false
LD_LIBRARY_PATH=/nonexistent
no_gpu="the machine that built kv8 shows no GPU ($(echo "$others" | tr -d ')') or a list such as 90)"
expect "none: $no_gpu"
expect "KV8_CUDA=ON: no CUDA kernels: $no_gpu" -DKV8_CUDA=ON
[ $bad -eq 0 ] || exit 1
echo "KV8_CUDA_ARCHS and KV8_CUDA: ten machines and settings, each in one line"
