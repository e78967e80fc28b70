/* A Vulkan layer for tests: each software device looks like a GPU whose memory is really limited.
 *
 * VK_TEST_CARDS="discrete:600,integrated:900:no-budget" (MiB) describes one card for each device of the
 * drivers, in their order. VK_TEST_CACHE names a file in which processes record how much they have allocated,
 * as if they shared the cards. Each locks the byte whose offset is its share's number, so the share of a
 * process that has ended no longer counts. Without that file a process is alone.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vulkan/vk_layer.h>
#include <vulkan/vulkan.h>

enum { MOST_CARDS = 8, MOST_PROCESSES = 256, MOST_DEVICES = 64, MOST_ALLOCATIONS = 1 << 16 };

typedef struct {
    VkPhysicalDevice handle;
    VkPhysicalDeviceType type;
    uint64_t total;
    int has_budget;
} Card;

/* One process's bytes on each card. */
typedef struct {
    _Atomic uint64_t used[MOST_CARDS];
} Share;

static Card cards[MOST_CARDS];
static uint32_t n_described, n_found;
static Share *shares, *own;
static int state = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static VkInstance instance;
static PFN_vkGetInstanceProcAddr next_instance_function;

static struct {
    VkDevice handle;
    int card;
    PFN_vkGetDeviceProcAddr next;
    PFN_vkAllocateMemory allocate;
    PFN_vkFreeMemory release;
} devices[MOST_DEVICES];
static int n_devices;

static struct {
    VkDeviceMemory memory;
    uint64_t size;
    int device;
} allocations[MOST_ALLOCATIONS];

/* --- the cards ------------------------------------------------------------------------------------ */

static void describe(void) {
    const char *given = getenv("VK_TEST_CARDS");
    if (!given || n_described) return;
    char *text = strdup(given), *rest = NULL;
    for (char *each = strtok_r(text, ",", &rest); each && n_described < MOST_CARDS; each = strtok_r(NULL, ",", &rest)) {
        Card *card = &cards[n_described++];
        const char *size = strchr(each, ':');
        card->type = strncmp(each, "integrated", 10) ? VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU
                                                     : VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU;
        card->total = (size ? strtoull(size + 1, NULL, 10) : 1024) << 20;
        card->has_budget = !strstr(each, ":no-budget");
    }
    free(text);
}

/* Locks a share's byte, or checks whether another process has locked it. */
static int lock_share(int i, int command) {
    struct flock byte = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = i, .l_len = 1};
    int result = fcntl(state, command, &byte);
    return command == F_GETLK ? result == 0 && byte.l_type != F_UNLCK : result == 0;
}

static void join_the_others(void) {
    if (own) return;
    const char *path = getenv("VK_TEST_CACHE");
    size_t size = sizeof(Share) * MOST_PROCESSES;
    if (path) state = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (path && (state < 0 || ftruncate(state, (off_t)size))) abort();
    shares = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | (path ? 0 : MAP_ANONYMOUS), state, 0);
    if (shares == MAP_FAILED) abort();
    for (int i = 0; i < MOST_PROCESSES && !own; i++)
        if (!path || lock_share(i, F_SETLK)) own = &shares[i];
    if (!own) abort();
    for (int card = 0; card < MOST_CARDS; card++) atomic_store(&own->used[card], 0);
}

static uint64_t used_by_all(int card) {
    uint64_t sum = 0;
    for (int i = 0; i < MOST_PROCESSES; i++)
        if (&shares[i] == own || lock_share(i, F_GETLK)) sum += atomic_load(&shares[i].used[card]);
    return sum;
}

/* Functions below this layer, looked up while the instance is created: later the loader would return this
 * layer's own. */
static PFN_vkEnumeratePhysicalDevices next_devices;
static PFN_vkGetPhysicalDeviceProperties next_properties;
static PFN_vkGetPhysicalDeviceProperties2 next_properties2;
static PFN_vkGetPhysicalDeviceMemoryProperties next_memory;
static PFN_vkGetPhysicalDeviceMemoryProperties2 next_memory2;
static PFN_vkEnumerateDeviceExtensionProperties next_extensions;

/* The card's index, or -1 for a device without a description. */
static int card_of(VkPhysicalDevice device) {
    pthread_mutex_lock(&lock);
    if (!n_found) {
        VkPhysicalDevice found[MOST_CARDS];
        n_found = MOST_CARDS;
        next_devices(instance, &n_found, found);
        for (uint32_t i = 0; i < n_found && i < n_described; i++) cards[i].handle = found[i];
    }
    pthread_mutex_unlock(&lock);
    for (uint32_t i = 0; i < n_described; i++)
        if (cards[i].handle == device) return (int)i;
    return -1;
}

/* --- properties of a device -------------------------------------------------------------- */

static void dress(VkPhysicalDevice device, VkPhysicalDeviceProperties *told) {
    int card = card_of(device);
    if (card < 0) return;
    told->deviceType = cards[card].type;
    told->deviceID = (uint32_t)card;
    snprintf(told->deviceName, sizeof told->deviceName, "Test GPU %d", card);
}

static VKAPI_ATTR void VKAPI_CALL get_properties(VkPhysicalDevice device, VkPhysicalDeviceProperties *told) {
    next_properties(device, told);
    dress(device, told);
}

static VKAPI_ATTR void VKAPI_CALL get_properties2(VkPhysicalDevice device, VkPhysicalDeviceProperties2 *told) {
    next_properties2(device, told);
    dress(device, &told->properties);
    int card = card_of(device);
    if (card < 0) return;
    for (VkBaseOutStructure *each = told->pNext; each; each = each->pNext) {
        if (each->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES)
            ((VkPhysicalDeviceIDProperties *)each)->deviceUUID[15] = (uint8_t)(card + 1);
        if (each->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES)
            ((VkPhysicalDeviceVulkan11Properties *)each)->deviceUUID[15] = (uint8_t)(card + 1);
    }
}

static VKAPI_ATTR void VKAPI_CALL get_memory(VkPhysicalDevice device, VkPhysicalDeviceMemoryProperties *told) {
    next_memory(device, told);
    int card = card_of(device);
    if (card >= 0) told->memoryHeaps[0].size = cards[card].total;
}

static VKAPI_ATTR void VKAPI_CALL get_memory2(VkPhysicalDevice device, VkPhysicalDeviceMemoryProperties2 *told) {
    next_memory2(device, told);
    int card = card_of(device);
    if (card < 0) return;
    told->memoryProperties.memoryHeaps[0].size = cards[card].total;
    for (VkBaseOutStructure *each = told->pNext; each; each = each->pNext) {
        if (each->sType != VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT) continue;
        VkPhysicalDeviceMemoryBudgetPropertiesEXT *budget = (void *)each;
        uint64_t ours = atomic_load(&own->used[card]);
        budget->heapBudget[0] = cards[card].total - (used_by_all(card) - ours);
        budget->heapUsage[0] = ours;
    }
}

static VKAPI_ATTR VkResult VKAPI_CALL get_extensions(
    VkPhysicalDevice device, const char *layer, uint32_t *count, VkExtensionProperties *told) {
    int card = card_of(device);
    if (layer || card < 0 || cards[card].has_budget) return next_extensions(device, layer, count, told);
    uint32_t n_all = 0, n = 0;
    next_extensions(device, NULL, &n_all, NULL);
    VkExtensionProperties *all = calloc(n_all, sizeof *all);
    next_extensions(device, NULL, &n_all, all);
    for (uint32_t i = 0; i < n_all; i++) {
        if (!strcmp(all[i].extensionName, VK_EXT_MEMORY_BUDGET_EXTENSION_NAME)) continue;
        if (told && n < *count) told[n] = all[i];
        n++;
    }
    free(all);
    if (told && *count < n) return VK_INCOMPLETE;
    *count = n;
    return VK_SUCCESS;
}

/* --- memory --------------------------------------------------------------------------------------- */

static int device_of(VkDevice handle) {
    for (int i = 0; i < n_devices; i++)
        if (devices[i].handle == handle) return i;
    return -1;
}

static VKAPI_ATTR VkResult VKAPI_CALL allocate(
    VkDevice handle, const VkMemoryAllocateInfo *info, const VkAllocationCallbacks *callbacks, VkDeviceMemory *memory) {
    int device = device_of(handle), card = devices[device].card;
    pthread_mutex_lock(&lock);
    if (card >= 0 && used_by_all(card) + info->allocationSize > cards[card].total) {
        pthread_mutex_unlock(&lock);
        return VK_ERROR_OUT_OF_DEVICE_MEMORY;
    }
    VkResult result = devices[device].allocate(handle, info, callbacks, memory);
    if (result == VK_SUCCESS && card >= 0) {
        atomic_fetch_add(&own->used[card], info->allocationSize);
        int free_entry = 0;
        while (allocations[free_entry].memory) free_entry++;
        allocations[free_entry].memory = *memory;
        allocations[free_entry].size = info->allocationSize;
        allocations[free_entry].device = device;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static VKAPI_ATTR void VKAPI_CALL release(
    VkDevice handle, VkDeviceMemory memory, const VkAllocationCallbacks *callbacks) {
    int device = device_of(handle);
    pthread_mutex_lock(&lock);
    for (int i = 0; memory && i < MOST_ALLOCATIONS; i++) {
        if (allocations[i].memory != memory || allocations[i].device != device) continue;
        atomic_fetch_sub(&own->used[devices[device].card], allocations[i].size);
        allocations[i].memory = VK_NULL_HANDLE;
        break;
    }
    pthread_mutex_unlock(&lock);
    devices[device].release(handle, memory, callbacks);
}

/* --- the layer ------------------------------------------------------------------------------------ */

static VKAPI_ATTR VkResult VKAPI_CALL create_device(
    VkPhysicalDevice device, const VkDeviceCreateInfo *info, const VkAllocationCallbacks *callbacks, VkDevice *made) {
    VkLayerDeviceCreateInfo *link = (void *)info->pNext;
    while (link && (link->sType != VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO))
        link = (void *)link->pNext;
    if (!link || n_devices == MOST_DEVICES) return VK_ERROR_INITIALIZATION_FAILED;
    PFN_vkGetInstanceProcAddr next_of_instance = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    PFN_vkGetDeviceProcAddr next = link->u.pLayerInfo->pfnNextGetDeviceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    PFN_vkCreateDevice create = (PFN_vkCreateDevice)next_of_instance(instance, "vkCreateDevice");
    VkResult result = create(device, info, callbacks, made);
    if (result != VK_SUCCESS) return result;
    devices[n_devices].card = card_of(device);
    devices[n_devices].next = next;
    devices[n_devices].allocate = (PFN_vkAllocateMemory)next(*made, "vkAllocateMemory");
    devices[n_devices].release = (PFN_vkFreeMemory)next(*made, "vkFreeMemory");
    devices[n_devices++].handle = *made;
    return VK_SUCCESS;
}

static VKAPI_ATTR VkResult VKAPI_CALL create_instance(
    const VkInstanceCreateInfo *info, const VkAllocationCallbacks *callbacks, VkInstance *made) {
    VkLayerInstanceCreateInfo *link = (void *)info->pNext;
    while (link && (link->sType != VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO))
        link = (void *)link->pNext;
    if (!link) return VK_ERROR_INITIALIZATION_FAILED;
    describe();
    join_the_others();
    next_instance_function = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    VkResult result = ((PFN_vkCreateInstance)next_instance_function(NULL, "vkCreateInstance"))(info, callbacks, made);
    if (result != VK_SUCCESS) return result;
    instance = *made;
    n_found = 0;
#define NEXT(name, function) name = (PFN_##function)next_instance_function(instance, #function)
    NEXT(next_devices, vkEnumeratePhysicalDevices);
    NEXT(next_properties, vkGetPhysicalDeviceProperties);
    NEXT(next_properties2, vkGetPhysicalDeviceProperties2);
    NEXT(next_memory, vkGetPhysicalDeviceMemoryProperties);
    NEXT(next_memory2, vkGetPhysicalDeviceMemoryProperties2);
    NEXT(next_extensions, vkEnumerateDeviceExtensionProperties);
#undef NEXT
    return VK_SUCCESS;
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL instance_function(VkInstance of, const char *name);

#define OURS(known, function) \
    if (!strcmp(name, known)) return (PFN_vkVoidFunction)function

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL device_function(VkDevice of, const char *name) {
    OURS("vkGetDeviceProcAddr", device_function);
    OURS("vkAllocateMemory", allocate);
    OURS("vkFreeMemory", release);
    int device = device_of(of);
    return device < 0 ? NULL : devices[device].next(of, name);
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL instance_function(VkInstance of, const char *name) {
    OURS("vkGetInstanceProcAddr", instance_function);
    OURS("vkGetDeviceProcAddr", device_function);
    OURS("vkCreateInstance", create_instance);
    OURS("vkCreateDevice", create_device);
    OURS("vkGetPhysicalDeviceProperties", get_properties);
    OURS("vkGetPhysicalDeviceProperties2", get_properties2);
    OURS("vkGetPhysicalDeviceProperties2KHR", get_properties2);
    OURS("vkGetPhysicalDeviceMemoryProperties", get_memory);
    OURS("vkGetPhysicalDeviceMemoryProperties2", get_memory2);
    OURS("vkGetPhysicalDeviceMemoryProperties2KHR", get_memory2);
    OURS("vkEnumerateDeviceExtensionProperties", get_extensions);
    return next_instance_function ? next_instance_function(of, name) : NULL;
}

VKAPI_ATTR VkResult VKAPI_CALL vkNegotiateLoaderLayerInterfaceVersion(VkNegotiateLayerInterface *told) {
    told->loaderLayerInterfaceVersion = 2;
    told->pfnGetInstanceProcAddr = instance_function;
    told->pfnGetDeviceProcAddr = device_function;
    told->pfnGetPhysicalDeviceProcAddr = NULL;
    return VK_SUCCESS;
}
