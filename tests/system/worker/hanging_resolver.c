/* Preloaded into a worker: looking up a name that ends in .hangs takes an hour and fails,
   as if no name server answered. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
    size_t length = name ? strlen(name) : 0;
    if (length > 6 && strcmp(name + length - 6, ".hangs") == 0) {
        sleep(3600);
        return EAI_AGAIN;
    }
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    return real(name, service, hints, found);
}
