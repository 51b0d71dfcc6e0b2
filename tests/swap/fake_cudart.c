/* The CUDA runtime on top of fake_cuda.cpp: the two calls that NIXL's GDS plugins make. The real one asks much more of a
 * driver. */
#include <dlfcn.h>

int cudaSetDevice(int device);
const char *cudaGetErrorString(int error);

int cudaSetDevice(int device) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int (*get)(int *, int) = (int (*)(int *, int))dlsym(driver, "cuDeviceGet");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*set)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    int error = get(&device, device);
    if (!error)
        error = retain(&context, device);
    return error ? error : set(context);
}

const char *cudaGetErrorString(int error) { return error ? "an error of the fake driver" : "no error"; }
