# cmake -DNVCC= -DSOURCE=x.cu -DOUT=dir/x -DARCHS="80 90a" -DFLAGS= -P compile_cuda.cmake
# Writes OUT.fatbin (machine code for ARCHS), OUT.d (what it was made of) and OUT.log (ptxas -v:
# registers, shared memory, spills of every kernel). Compiler output is shown when it fails or warns.
separate_arguments(ARCHS)
separate_arguments(FLAGS)
# The compiler's front half runs once for all that read one PTX, and is half of the time: no source
# says anything to 10.x or 12.x that it does not say to 9.0.
foreach(arch ${ARCHS})
  set(ptx ${arch})
  if(arch GREATER 90)
    set(ptx 90)
  endif()
  list(APPEND targets -gencode arch=compute_${ptx},code=sm_${arch})
endforeach()
execute_process(COMMAND ${NVCC} -fatbin ${targets} ${FLAGS} -Xptxas -v -MD -MF ${OUT}.d
  -o ${OUT}.fatbin ${SOURCE} RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
file(WRITE ${OUT}.log "${said}")
string(REGEX REPLACE "(ptxas info|    [0-9]+ bytes stack)[^\n]*\n" "" rest "${said}")
if(failed)
  file(REMOVE ${OUT}.fatbin)
  message(FATAL_ERROR "${rest}")
elseif(rest)
  message("${rest}")
endif()
